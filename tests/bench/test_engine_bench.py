import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moonlet.bench import engine
from moonlet.bench.costs import decode_flops, prefill_flops
from moonlet.bench.engine import DecodeResult, PrefillResult, bench_engine
from moonlet.bench.step_clock import StepClock, attn_res_clock
from moonlet.bench.weights import ExpertCount, bytes_by_dtype, stored_bytes, touched_bytes
from moonlet.cli.main import run
from moonlet.core.errors import ConfigError, RequestError
from moonlet.kernels import _native
from moonlet.model.latent_moe import Experts
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_config, tiny_model
from moonlet.train.init import initialize
from moonlet.train.recipe import InitOptions
from moonlet.weights.checkpoint import load_for_inference
from moonlet.weights.loader import LoadedModel
from moonlet.weights.trunk import quantize_trunk
from tests.bench.buffers import small_buffers
from tests.patience import PATIENCE_S

SETTING = {
    *("checkpoint", "dtype", "kernels", "prompt_len", "output_len", "repeats", "threads"),
    *("weight_bytes_by_dtype", "moe_activation", "trunk", "trunk_activation"),
    *("isa_level", "probe", "probe_samples", "read_bandwidth_bytes_per_s", "fma_flops_per_s"),
    *("load_average", "rss_before_load_bytes", "rss_bytes", "weight_bytes", "results", "prefill"),
}
BOTH = {
    *("tokens_per_s", "all_tokens_per_s", "bound_tokens_per_s", "ratio", "flops_per_s", "wall_s"),
    *("gflop_per_token", "flop_shares", "attn_res_share"),
}
DECODE = BOTH | {
    *("streams", "step_s", "forward_calls", "distinct_experts", "weight_bytes_per_step"),
    "bytes_per_s",
}


Runs = list[DecodeResult | PrefillResult]


@pytest.fixture(scope="module")
def measured(checkpoint: Path) -> tuple[dict[str, Any], Runs]:
    """A report, and its runs in the order in which they were made."""
    seen: Runs = []
    with pytest.MonkeyPatch.context() as patch:
        small_buffers(patch)
        report = bench_engine(
            checkpoint,
            streams=(1, 4),
            prompt_len=3,
            output_len=4,
            prefill=(5, 40),
            repeats=3,
            on_run=seen.append,
        )
    return report, seen


def test_a_report_relates_speed_to_the_bounds(measured: tuple[dict[str, Any], Runs]) -> None:
    report, seen = measured
    assert json.loads(json.dumps(report)) == report
    assert set(report) == SETTING
    order = [r.streams if isinstance(r, DecodeResult) else -r.prompt_tokens for r in seen]
    assert order == [1, 4, -5, -40] * 3
    # a probe before each run and one after the last
    assert report["probe_samples"] == 13
    for row in report["results"]:
        assert set(row) == DECODE
        mine = [r for r in seen if isinstance(r, DecodeResult) and r.streams == row["streams"]]
        assert row["tokens_per_s"] == sorted(r.tokens_per_s for r in mine)[1]
        assert row["tokens_per_s"] == pytest.approx(row["streams"] / row["step_s"])
        bound = row["streams"] * report["read_bandwidth_bytes_per_s"] / row["weight_bytes_per_step"]
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / bound)
        # the prompts and 3 decode steps; the first prompt may be a step ahead of the others
        assert 4 <= row["forward_calls"] <= (4 if row["streams"] == 1 else 5)
        assert row["step_s"] < row["wall_s"]
        assert 0 < row["attn_res_share"] < 1
        assert sum(row["flop_shares"].values()) == pytest.approx(1)
    one, four = report["results"]
    assert 0 < one["distinct_experts"] <= four["distinct_experts"]
    assert one["weight_bytes_per_step"] < four["weight_bytes_per_step"]
    assert four["weight_bytes_per_step"] < report["weight_bytes"] < report["rss_bytes"]


def test_prefill_is_related_to_the_arithmetic(measured: tuple[dict[str, Any], Runs]) -> None:
    report, _ = measured
    config = tiny_config()
    for row in report["prefill"]:
        assert set(row) == BOTH | {"prompt_tokens"}
        flops = prefill_flops(config, row["prompt_tokens"]).total
        assert row["gflop_per_token"] == pytest.approx(flops / row["prompt_tokens"] / 1e9)
        assert row["flops_per_s"] == pytest.approx(flops / row["wall_s"])
        assert row["ratio"] == pytest.approx(row["flops_per_s"] / report["fma_flops_per_s"])
        assert row["tokens_per_s"] / row["ratio"] == pytest.approx(row["bound_tokens_per_s"])
        assert 0 < row["attn_res_share"] < 1
    assert [row["prompt_tokens"] for row in report["prefill"]] == [5, 40]


def test_work_per_token_is_that_of_the_mean_context(measured: tuple[dict[str, Any], Runs]) -> None:
    report, _ = measured
    four = report["results"][1]
    assert four["gflop_per_token"] == pytest.approx(
        decode_flops(tiny_config(), 4, 3 + 4 / 2).total / 4 / 1e9
    )


def test_streams_that_never_decode_together_are_an_error(checkpoint: Path) -> None:
    # 512 rows a step: the second prompt ends when the first stream has ended
    with pytest.raises(ConfigError, match="output_len is 2"):
        bench_engine(checkpoint, streams=(8,), prompt_len=400, output_len=2, repeats=1)


def test_touched_bytes_count_used_experts_and_table_rows_only() -> None:
    config = tiny_config()
    model = Transformer(config)
    assert config.moe is not None
    everything = stored_bytes(model)
    buffers = sum(b.nbytes for b in model.buffers())
    assert everything == buffers + sum(p.numel() * p.element_size() for p in model.parameters())
    table = config.vocab_size * config.hidden_size * 4
    all_used = touched_bytes(model, config.vocab_size, config.moe.num_experts)
    assert all_used == everything
    one_row = touched_bytes(model, 1, config.moe.num_experts)
    assert everything - one_row == table - config.hidden_size * 4
    expert = 3 * config.expert_input_size * config.moe.moe_intermediate_size * 4
    fewer = touched_bytes(model, 1, config.moe.num_experts - 1)
    assert one_row - fewer == expert * len(config.moe_layers)


def test_stored_weights_count_as_they_are_stored() -> None:
    wide, narrow = Transformer(tiny_config()), Transformer(tiny_config(), dtype=torch.bfloat16)
    assert touched_bytes(narrow, 1, 2) < 0.6 * touched_bytes(wide, 1, 2)


def test_packed_experts_count_their_codes_and_scales() -> None:
    config = tiny_config()
    model = Transformer(config)
    for module in model.modules():
        if isinstance(module, Experts):
            module.pack()
    assert config.moe is not None
    fewer, all_used = (touched_bytes(model, 1, config.moe.num_experts - n) for n in (1, 0))
    weights = 3 * config.expert_input_size * config.moe.moe_intermediate_size
    expert = weights // 2 + weights // 32
    assert all_used - fewer == expert * len(config.moe_layers)
    assert bytes_by_dtype(model)["uint8"] == expert * 4 * len(config.moe_layers)


def test_an_int8_trunk_counts_its_codes_and_scales() -> None:
    model = Transformer(tiny_config())
    initialize(model, model.config, InitOptions(seed=0))
    before, dtypes = touched_bytes(model, 1, 2), bytes_by_dtype(model)
    trunk = quantize_trunk(model)
    assert before - touched_bytes(model, 1, 2) == trunk.bytes_before - trunk.bytes_after
    after = bytes_by_dtype(model)
    scales = trunk.bytes_after - after["int8"]
    assert 0 < scales < after["int8"]
    assert dtypes == {"float32": stored_bytes(model) + trunk.bytes_before - trunk.bytes_after}
    assert after["float32"] == dtypes["float32"] - trunk.bytes_before + scales


def forward(model: Transformer, rows: int) -> None:
    with torch.no_grad():
        model.forward(torch.arange(rows), BatchMeta.build([rows]), NoState(model.config))


def test_the_step_clock_sees_rows_and_attn_res() -> None:
    model, clock = tiny_model(), StepClock()

    def step(rows: int) -> None:
        clock.note(rows)
        forward(model, rows)

    step(3)
    plain = model.kernels
    with attn_res_clock(model, clock):
        assert model.kernels is not plain
        step(2)
    assert model.kernels is plain
    step(1)
    steps = clock.take()
    assert [step.rows for step in steps] == [3, 2, 1]
    assert [step.attn_res_s > 0 for step in steps] == [False, True, False]
    assert all(step.attn_res_s < step.seconds for step in steps)
    assert clock.take() == []


def test_the_step_clock_holds_steps_back() -> None:
    clock = StepClock()
    done = threading.Event()

    def run_one() -> None:
        clock.note(1)
        done.set()

    thread = threading.Thread(target=run_one)
    with clock.held():
        thread.start()
        assert not done.wait(0.05)
    thread.join(PATIENCE_S)
    assert done.is_set()
    assert [step.rows for step in clock.take()] == [1]


def test_the_expert_count_ignores_prompts() -> None:
    model = tiny_model()
    count = ExpertCount(model)
    count.rows = 1
    forward(model, 40)
    assert count.take() == 0
    forward(model, 1)
    assert count.take() == 2
    count.remove()
    forward(model, 1)
    assert count.take() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"streams": (0,)}, "streams is 0"),
        ({"streams": ()}, "streams is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"prompt_len": 0}, "prompt_len is 0"),
        ({"prefill": (5, 0)}, "prefill is 0"),
        ({"output_len": 1}, "output_len is 1"),
        ({"prefill": (4096,)}, "max_model_len is 4097"),
    ],
)
def test_bad_counts_are_refused(checkpoint: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=words):
        bench_engine(checkpoint, **options)


FLAGS = ["--output-len", "3", "--repeats", "1"]


def measured_model(
    checkpoint: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], torch.Tensor]:
    """The report of a run with some flags, and logits of the model that was measured."""
    seen: list[LoadedModel] = []

    def load(*arguments: Any, **options: Any) -> LoadedModel:
        seen.append(load_for_inference(*arguments, **options))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load_for_inference", load)
        command = ["bench", "engine", str(checkpoint), *FLAGS, "--streams", "1", "--json"]
        assert run([*command, *flags]) == 0
    model, rows = seen[0].model, 9
    with torch.inference_mode():
        meta = BatchMeta.build([rows])
        hidden_TD = model.forward(torch.arange(rows), meta, NoState(model.config))
        return json.loads(capsys.readouterr().out), model.logits(hidden_TD)


def test_the_rounding_of_experts_inputs_is_that_of_the_flag(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for mode in ("bf16", "mxfp8", "mxfp8-floor", "int8"):
        report, logits = measured_model(checkpoint, ["--moe-activation", mode], capsys)
        assert (report["moe_activation"], report["trunk"]) == (mode, "stored")
        results.append(logits)
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)
        assert torch.allclose(one, other, atol=0.3 * float(results[0].std()))
    _, default = measured_model(checkpoint, [], capsys)
    assert torch.equal(default, results[0])


@pytest.mark.skipif(not _native.isa_levels(), reason="native kernels are not built")
def test_the_trunk_is_that_of_the_flag(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, exact = measured_model(checkpoint, ["--trunk", "stored"], capsys)
    int8, rounded = measured_model(checkpoint, ["--trunk", "int8"], capsys)
    assert not torch.equal(exact, rounded)
    assert (stored["trunk"], int8["trunk"]) == ("stored", "int8")
    assert set(stored["weight_bytes_by_dtype"]) == {"bfloat16", "uint8", "float32"}
    assert set(int8["weight_bytes_by_dtype"]) == {"bfloat16", "uint8", "float32", "int8"}
    for report in (stored, int8):
        assert sum(report["weight_bytes_by_dtype"].values()) == report["weight_bytes"]
    saved = stored["weight_bytes"] - int8["weight_bytes"]
    assert saved > 0
    of_a_step = [report["results"][0]["weight_bytes_per_step"] for report in (stored, int8)]
    assert of_a_step[0] - of_a_step[1] == saved


@pytest.mark.skipif(not _native.isa_levels(), reason="native kernels are not built")
def test_the_rounding_of_the_trunks_inputs_is_that_of_the_flag(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for mode in ("bf16", "int8"):
        flags = ["--trunk", "int8", "--trunk-activation", mode]
        report, logits = measured_model(checkpoint, flags, capsys)
        assert (report["trunk"], report["trunk_activation"]) == ("int8", mode)
        results.append((report, logits))
    (plain, exact), (coded, rounded) = results
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, atol=0.3 * float(exact.std()))
    # bytes of panels instead of rows
    assert "int8" in plain["weight_bytes_by_dtype"]
    assert "int8" not in coded["weight_bytes_by_dtype"]


def test_rounding_the_inputs_of_a_stored_trunk_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "engine", str(checkpoint), "--trunk-activation", "int8"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["moonlet: trunk_activation int8 needs trunk int8; trunk is stored"]


@pytest.mark.parametrize("flag", ["--trunk", "--trunk-activation", "--moe-activation"])
def test_unknown_precisions_are_refused(
    flag: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "engine", str(checkpoint), flag, "fp5"]) == 2
    assert flag in capsys.readouterr().err


def test_the_command_prints_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--streams", "1,2", "--prefill", "4", "--threads", "2", "--json"]
    assert run(["bench", "engine", str(checkpoint), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["streams"] for row in report["results"]] == [1, 2]
    assert [row["prompt_tokens"] for row in report["prefill"]] == [4]
    assert (report["threads"], report["repeats"], report["output_len"]) == (2, 1, 3)


def test_the_command_prints_tables(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "engine", str(checkpoint), *FLAGS, "--prefill", "4,6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny, float32, 1 thread(s)")
    assert lines[1].startswith("resident ")
    assert lines[2].startswith("trunk stored, its inputs bf16, experts' inputs bf16, weights as ")
    assert [line.split()[0] for line in lines[3:]] == ["streams", "1", "8", "prompt", "4", "6"]


def test_bad_flags_are_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "engine", str(checkpoint), "--repeats", "0"]) == 2
    assert "bench.repeats is 0" in capsys.readouterr().err
    assert run(["bench", "engine", str(checkpoint), "--threads", "0"]) == 2
    assert "--threads is 0" in capsys.readouterr().err
