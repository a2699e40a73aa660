import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moonlet.bench import kernels
from moonlet.bench.cases import kda
from moonlet.bench.cases.case import Shape
from moonlet.bench.cases.table import CASES
from moonlet.bench.kernels import bench_kernels, serving_backends
from moonlet.bench.scales import k3_quarter, random_config, scale_config
from moonlet.cli.main import run
from moonlet.core.errors import CapacityError, ConfigError, ShapeError
from moonlet.kernels import _native
from moonlet.kernels.registry import OPERATORS, Backend
from moonlet.testing import tiny_config
from tests.bench.backends import add_backend

ENTRY = {
    *("op", "case", "rows", "context", "backend", "is_cold", "copies", "seconds", "bytes"),
    *("flops",),
    *("bytes_per_s", "flops_per_s", "bound_s", "bound_by", "ratio"),
}
SETTING = {
    *("shape", "repeats", "working_set_bytes", "threads", "isa_level", "probe"),
    *("probe_samples", "read_bandwidth_bytes_per_s", "fma_flops_per_s", "load_average"),
    *("results", "refused"),
}


def measure(**options: Any) -> dict[str, Any]:
    return bench_kernels("tiny", tiny_config(), **{"rows": (1, 3), "repeats": 1, **options})


def test_every_operator_has_a_case() -> None:
    without = sorted(set(OPERATORS) - set(CASES))
    assert not without, f"add cases to bench/cases/table.py for {', '.join(without)}"
    assert set(CASES) <= set(OPERATORS), "a case is for no operator"


def test_every_operator_and_serving_backend_is_measured() -> None:
    report = measure()
    assert set(report) == SETTING
    assert json.loads(json.dumps(report)) == report
    expected = {
        (op, backend.name)
        for op in OPERATORS
        for backend in serving_backends(op, tiny_config(), ())[0]
    }
    refused = {(r["op"], r["backend"]) for r in report["refused"]}
    assert {(r["op"], r["backend"]) for r in report["results"]} == expected - refused
    for row in report["results"]:
        assert set(row) == ENTRY
        assert row["seconds"] > 0
        assert row["ratio"] == pytest.approx(row["bound_s"] / row["seconds"])
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
    assert {r["rows"] for r in report["results"]} == {1, 3}


def test_names_and_rows_select() -> None:
    report = measure(ops=("moe_experts", "rms_norm"), backends=("reference", "sorted"), rows=(2,))
    measured = [(r["op"], r["backend"], r["rows"]) for r in report["results"]]
    assert measured == [
        ("rms_norm", "reference", 2),
        ("moe_experts", "reference", 2),
        ("moe_experts", "sorted", 2),
    ]


def test_weights_are_measured_as_they_may_be_stored() -> None:
    ops = ("mla_prefill", "mla_decode", "moe_mxfp4", "linear")
    report = measure(ops=ops, backends=("reference",), rows=(2,))
    cases = {op: {r["case"]: r["bytes"] for r in report["results"] if r["op"] == op} for op in ops}
    assert list(cases["linear"]) == ["float32", "bfloat16", "int8", "int8 panels", "mxfp4"]
    assert sorted(cases["linear"].values(), reverse=True) == list(cases["linear"].values())
    for op in ("mla_prefill", "mla_decode"):
        assert cases[op]["bfloat16"] < cases[op]["float32"]
    # the rounding of activations moves no bytes
    assert list(cases["moe_mxfp4"]) == ["bf16", "mxfp8", "mxfp8-floor", "int8"]
    assert len(set(cases["moe_mxfp4"].values())) == 1


def test_decode_operators_take_few_sequences_only() -> None:
    report = measure(
        ops=("kda_step", "kda_chunk", "short_conv"), backends=("reference",), rows=(65,)
    )
    assert [(r["op"], r["case"]) for r in report["results"]] == [
        ("short_conv", "prefill"),
        ("kda_chunk", ""),
    ]


def test_a_context_is_what_attention_reads_and_how_long_a_chunked_sequence_is() -> None:
    ops = ("mla_decode", "mla_prefill", "kda_step", "kda_chunk", "rms_norm")
    report = measure(ops=ops, backends=("reference",), rows=(2, 3), contexts=(5, 40))
    seen = {
        op: {(r["rows"], r["context"]): r for r in report["results"] if r["op"] == op} for op in ops
    }
    for op in ("mla_decode", "mla_prefill"):
        assert set(seen[op]) == {(2, 5), (2, 40), (3, 5), (3, 40)}
        for what in ("bytes", "flops"):
            assert seen[op][2, 40][what] > seen[op][2, 5][what]
    # a recurrent state has one size
    assert set(seen["kda_step"]) == {(2, 5), (2, 40), (3, 5), (3, 40)}
    assert seen["kda_step"][2, 40]["bytes"] == seen["kda_step"][2, 5]["bytes"]
    assert set(seen["kda_chunk"]) == {(5, None), (40, None)}
    assert seen["kda_chunk"][40, None]["flops"] == 8 * seen["kda_chunk"][5, None]["flops"]
    assert set(seen["rms_norm"]) == {(2, None), (3, None)}


def test_without_a_context_rows_count_and_1024_lie_before() -> None:
    report = measure(ops=("mla_decode", "kda_chunk"), backends=("reference",), rows=(2,))
    sizes = {r["op"]: (r["rows"], r["context"]) for r in report["results"]}
    assert sizes == {"mla_decode": (2, 1024), "kda_chunk": (2, None)}


def test_a_step_of_kda_continues_after_its_context() -> None:
    def state(context: int) -> torch.Tensor:
        shape = Shape(
            config=tiny_config(),
            rows=1,
            context=context,
            generator=torch.Generator().manual_seed(0),
        )
        return kda._state_after(shape)

    assert not bool(state(0).any())
    short, long = state(3), state(3 + kda.CONTEXT_ROWS)
    assert short.shape == long.shape
    assert bool(torch.isfinite(long).all())
    assert not torch.equal(short, long)


def test_what_the_memory_cannot_hold_is_said_before_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "memory_bytes", lambda: 10**6)
    assert measure(ops=("mla_decode",), rows=(1,), contexts=(1000,))["results"]
    with pytest.raises(CapacityError, match=r"mla_decode of 1 rows after 20000 has .* --context"):
        measure(ops=("mla_decode",), rows=(1,), contexts=(20_000,))


def test_a_larger_working_set_takes_more_copies() -> None:
    one = measure(ops=("linear",), rows=(1,), working_set_bytes=1)
    many = measure(ops=("linear",), rows=(1,), working_set_bytes=50_000)
    assert {r["copies"] for r in one["results"]} == {1}
    copies = {r["case"]: r["copies"] for r in many["results"]}
    assert 1 < copies["float32"] < copies["bfloat16"] < copies["int8"]
    assert all(r["is_cold"] for r in many["results"])
    # what would take too many copies says so
    far = measure(ops=("rms_norm",), rows=(1,), working_set_bytes=1 << 30, backends=("reference",))
    assert [r["is_cold"] for r in far["results"]] == [False]


def test_calls_take_the_copies_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        seen.append(x.data_ptr())
        return x

    add_backend(monkeypatch, "rms_norm", spy)
    report = measure(ops=("rms_norm",), backends=("added",), rows=(1,), working_set_bytes=1500)
    copies = report["results"][0]["copies"]
    assert copies == 4
    assert len(set(seen[:copies])) == copies
    assert seen[copies : 2 * copies] == seen[:copies]


def test_a_backend_that_refuses_a_case_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        raise ShapeError("no, thank you")

    add_backend(monkeypatch, "linear", picky)
    report = measure(ops=("linear",), backends=("added",))
    assert report["results"] == []
    assert report["refused"] == [{"op": "linear", "backend": "added", "reason": "no, thank you"}]


def test_a_backend_that_cannot_serve_is_listed_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuses = Backend(name="added", target="nowhere:nothing", supports=lambda spec: "not today")
    monkeypatch.setitem(OPERATORS, "linear", (*OPERATORS["linear"], refuses))
    report = measure(ops=("linear",), rows=(1,))
    assert {"op": "linear", "backend": "added", "reason": "not today"} in report["refused"]


def test_without_the_native_library_torch_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_load", lambda: (None, "native kernels: not built"))
    report = measure(ops=("rms_norm",), rows=(1,))
    assert [r["backend"] for r in report["results"]] == ["reference"]
    assert (report["probe"], report["isa_level"]) == ("torch", None)
    assert "native kernels: not built" in {r["reason"] for r in report["refused"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ops": ("rms_nrm",)}, "the operators are rms_norm"),
        ({"backends": ("fast",)}, "the backends are cpu, reference"),
        ({"rows": (4, 0)}, "bench.rows is 0"),
        ({"rows": ()}, "bench.rows is 0"),
        ({"contexts": (4, 0)}, "bench.context is 0"),
        ({"repeats": 0}, "bench.repeats is 0"),
    ],
)
def test_bad_names_and_counts_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure(**options)


def test_an_operator_without_a_case_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "new_op", OPERATORS["linear"])
    with pytest.raises(ConfigError, match="new_op has no case"):
        measure(ops=("new_op",))


def test_scales_and_folders_give_architectures(checkpoint: Path) -> None:
    assert scale_config("k3-quarter", checkpoint) == ("k3-quarter", k3_quarter())
    assert scale_config(None, checkpoint)[0] == "tiny"
    assert scale_config(None, checkpoint)[1].hidden_size == tiny_config().hidden_size
    with pytest.raises(ConfigError, match="k3-quarter, nano"):
        scale_config("k3", checkpoint)


def test_a_quarter_has_the_inner_widths_of_k3() -> None:
    config = k3_quarter()
    assert config.mla.cache_size == 576
    assert config.kda.head_dim == 128
    assert 4 * config.hidden_size == 7168
    assert 4 * config.kda.num_heads == 96


def test_random_architectures_differ_and_repeat() -> None:
    drawn = [random_config(random.Random(seed)) for seed in range(20)]
    assert drawn == [random_config(random.Random(seed)) for seed in range(20)]
    assert len({config.hidden_size for config in drawn}) > 5
    assert any(config.hidden_size % 32 for config in drawn)
    assert any(config.hidden_size % 32 == 0 for config in drawn)
    assert {config.kda.gate_lower_bound for config in drawn} == {-5.0, -1.5, None}


# ---- command -----------------------------------------------------------------------------------

ONE_OP = ["bench", "kernels", "--op", "swiglu", "--backend", "reference", "--repeats", "1"]


def test_the_command_prints_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shape-of", str(checkpoint), "--rows", "2,3", "--rows", "5", "--json"]
    assert run([*ONE_OP, *flags, "--threads", "2", "--working-set-mib", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["shape"] == "tiny"
    assert report["threads"] == 2
    assert report["working_set_bytes"] == 1 << 20
    assert [row["rows"] for row in report["results"]] == [2, 3, 5]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ONE_OP, "--rows", "2", "--scale", "nano"]) == 0
    head, names, row = capsys.readouterr().out.splitlines()
    assert head.startswith("shapes of moonlet-nano, 1 thread(s)")
    assert "GB/s" in names
    assert row.split()[:3] == ["swiglu", "2", "reference"]


def test_the_command_takes_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "kernels", "--backend", "reference", "--repeats", "1", "--scale", "nano"]
    flags = ["--op", "mla_decode", "--rows", "2", "--context", "3,70"]
    assert run([*command, *flags]) == 0
    _, names, *rows = capsys.readouterr().out.splitlines()
    assert names.split()[2:7] == ["rows", "after", "backend", "us", "us/row"]
    assert [row.split()[2:4] for row in rows] == [["2", "3"]] * 2 + [["2", "70"]] * 2
    for row in rows:
        us, per_row = map(float, row.split()[5:7])
        assert per_row == pytest.approx(us / 2, abs=0.06)


def test_quarter_shapes_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ONE_OP, "--rows", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["shape"] == "k3-quarter"
    assert report["results"][0]["bytes"] == 3 * 4 * 2 * 768


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scale", "nano", "--shape-of", "."], "give one of them"),
        (["--check", "--scale", "nano"], "--check draws random shapes"),
        (["--check", "--context", "5"], "--check draws random shapes"),
        (["--context", "0"], "bench.context is 0"),
        (["--scale", "huge"], "--scale is 'huge'"),
        (["--threads", "0"], "--threads is 0"),
        (["--rows", "1,x"], "Invalid value for --rows"),
        (["--op", "nothing"], "--op is 'nothing'"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "kernels", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
