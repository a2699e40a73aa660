import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moonlet.bench import longctx
from moonlet.bench.costs import decode_flops, state_bytes
from moonlet.bench.longctx import bench_longctx, build_pair, reduced_config
from moonlet.bench.scales import k3_quarter
from moonlet.bench.weights import touched_bytes
from moonlet.cli.main import run
from moonlet.core.errors import CapacityError, ConfigError
from moonlet.model.state import BatchMeta
from moonlet.testing import tiny_config

SETTING = {
    *("architecture", "layers", "kda_layers", "num_experts", "kernels", "weight_bytes", "repeats"),
    *("threads", "isa_level", "probe", "probe_samples", "read_bandwidth_bytes_per_s"),
    *("fma_flops_per_s", "load_average", "results"),
}
STEP = {
    *("step_s", "all_step_s", "bytes", "flops", "bytes_per_s", "flops_per_s", "bound_s"),
    *("bound_by", "ratio"),
}


def test_both_networks_are_related_to_their_bounds() -> None:
    config = tiny_config()
    report = bench_longctx("tiny", config, contexts=(70, 200), repeats=2)
    assert set(report) == SETTING
    assert json.loads(json.dumps(report)) == report
    assert report["probe_samples"] == 4
    pair = build_pair(config)
    for row in report["results"]:
        assert set(row) == {"context", "buffers", "model", "twin", "twin_over_model"}
        for name, network in zip(("model", "twin"), pair, strict=True):
            step = row[name]
            assert set(step) == STEP
            assert len(step["all_step_s"]) == 2
            assert step["ratio"] == pytest.approx(step["bound_s"] / step["step_s"])
            moved = touched_bytes(network, 1, 2) + state_bytes(network.config, 1, row["context"])
            assert step["bytes"] == moved
            assert step["flops"] == decode_flops(network.config, 1, row["context"]).total
        ratio = row["twin"]["step_s"] / row["model"]["step_s"]
        assert row["twin_over_model"] == pytest.approx(ratio)
    assert [row["context"] for row in report["results"]] == [70, 200]


def test_the_twin_differs_in_the_attention_of_kda_layers_only() -> None:
    model, twin = build_pair(tiny_config())
    assert twin.config == dataclasses.replace(model.config, kda_layers=())
    mine, its = dict(model.named_parameters()), dict(twin.named_parameters())
    shared = {name for name in its if name in mine and its[name] is mine[name]}
    own = set(its) - shared
    assert all(name.split(".")[:1] == ["layers"] and ".self_attn." in name for name in own)
    assert {int(name.split(".")[1]) for name in own} == {0, 1, 2}
    assert all(not p.is_meta and bool(p.isfinite().all()) for p in its.values())
    assert any(p.abs().max() > 0 for p in its.values())


def test_filled_state_is_what_a_step_attends_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longctx, "FILL_ROWS", 32)
    config, context = tiny_config(), 100
    model, _ = build_pair(config)
    state = longctx._filled_state(config, 2, context)
    view = longctx._View(state, model.config, 3, 2)
    network = longctx._Network("model", model, view)
    meta = BatchMeta.build([1], slots=[1], start_positions=[context - 1])
    pages = view.mla(3).view(meta)
    assert pages.lengths_S.tolist() == [context]
    latent, shared = pages.packed()
    assert latent.shape == (context, config.mla.kv_lora_rank)
    assert bool((latent.abs().amax(-1) > 0).all())
    assert bool((shared.abs().amax(-1) > 0).all())
    assert bool(view.kda(1).load(meta).any())
    assert bool(view.kda(1).load_conv(meta).any())

    with torch.inference_mode():
        assert network.step(context) > 0
        after, _ = view.mla(3).view(meta).packed()
    # the step wrote its own row and no other
    assert torch.equal(after[:-1], latent[:-1])
    assert not torch.equal(after[-1], latent[-1])


def test_layers_take_the_buffers_in_turn() -> None:
    config = dataclasses.replace(
        tiny_config(num_hidden_layers=8, moe_layers=()), kda_layers=(0, 2, 4, 6)
    )
    state = longctx._filled_state(config, 2, 10)
    mine = longctx._View(state, config, 4, 2)
    # the model's MLA layers are every other one; neighbours still get different buffers
    buffers = [id(mine.mla(layer)) for layer in (1, 3, 5, 7)]
    assert len(set(buffers)) == 2
    assert buffers[:2] == buffers[2:]
    twin = longctx._View(state, dataclasses.replace(config, kda_layers=()), 4, 2)
    assert {id(twin.mla(layer)) for layer in range(8)} == set(buffers)


def test_buffers_exceed_the_cache_but_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    each = 1000 * config.mla.cache_size * 4
    monkeypatch.setattr(longctx, "cold_bytes", lambda: each)
    assert longctx._num_buffers(config, 1000, 100 * each) == 1
    monkeypatch.setattr(longctx, "cold_bytes", lambda: each + 1)
    assert longctx._num_buffers(config, 1000, 100 * each) == 2
    assert longctx._num_buffers(config, 1000, 4 * each) == 1
    monkeypatch.setattr(longctx, "cold_bytes", lambda: 50 * each)
    assert longctx._num_buffers(config, 1000, 100 * each) == config.num_hidden_layers


def test_few_experts_are_kept_and_a_step_reads_as_many() -> None:
    quarter = k3_quarter()
    reduced = reduced_config(quarter)
    assert quarter.moe is not None
    assert reduced.moe is not None
    assert reduced.moe.num_experts == 16 < quarter.moe.num_experts
    assert reduced.moe.num_experts_per_token == quarter.moe.num_experts_per_token
    tiny = tiny_config()
    assert reduced_config(tiny) == tiny
    assert reduced_config(tiny_config(moe=None, moe_layers=())).moe is None


def test_what_does_not_fit_is_said_before_it_is_built() -> None:
    with pytest.raises(CapacityError, match=r"--memory-gib allows 1\.00 MB"):
        bench_longctx("tiny", tiny_config(), contexts=(10_000,), memory_bytes=10**6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"contexts": ()}, "context is 0"),
        ({"contexts": (5, 0)}, "context is 0"),
        ({"contexts": (5,), "repeats": 0}, "repeats is 0"),
    ],
)
def test_bad_counts_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench_longctx("tiny", tiny_config(), **options)


def test_the_command_prints_json_and_a_table(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "longctx", str(checkpoint), "--repeats", "1"]
    assert run([*command, "--context", "20,30", "--threads", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["context"] for row in report["results"]] == [20, 30]
    assert (report["architecture"], report["threads"], report["kda_layers"]) == ("tiny", 2, 3)
    assert run([*command, "--context", "20", "--context", "9000"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("tiny, 4 layers, 3 of them KDA")
    cells = [row.split()[:2] for row in rows]
    assert cells == [[n, w] for n in ("20", "9000") for w in ("model", "twin")]


def test_bad_flags_are_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "longctx", str(checkpoint), "--scale", "nano"]) == 2
    assert "give one of them" in capsys.readouterr().err
    quarter = ["bench", "longctx", "--scale", "k3-quarter", "--memory-gib", "1"]
    assert run(quarter) == 3
    error = capsys.readouterr().err
    assert "--memory-gib allows 1.07 GB" in error
    assert len(error.splitlines()) == 1
