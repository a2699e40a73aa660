import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moonlet.core.errors import CheckpointError, ConfigError
from moonlet.train import trainer as trainer_module
from moonlet.train.checkpoint import latest_checkpoint, load_checkpoint
from moonlet.train.data import ShardStream
from moonlet.train.metrics import MetricsFile
from moonlet.train.recipe import BalancingOptions, QuantizationOptions, Recipe
from moonlet.train.schedule import CosineSchedule
from tests.train.runs import copying, tiny_recipe, tiny_trainer

ROOT = Path(__file__).parents[2]


def recipe() -> Recipe:
    """Every kind of state: averages in balancing, quantisation in the second half."""
    return tiny_recipe(
        balancing=BalancingOptions(ema=0.7),
        quantization=QuantizationOptions(start_fraction=0.5, activations="mxfp8"),
    )


def everything(path: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(path).tensors


def test_resuming_changes_no_bit(tmp_path: Path) -> None:
    straight = tiny_trainer(recipe())
    straight.run(lambda m: None, checkpoints=tmp_path / "straight")

    first = tiny_trainer(recipe())
    for _ in range(4):
        first.step()
    first.save(tmp_path / "split")
    second = tiny_trainer(recipe())
    second.load(latest_checkpoint(tmp_path / "split"))
    assert second.step_number == 4
    second.run(lambda m: None, checkpoints=tmp_path / "split")

    expected = latest_checkpoint(tmp_path / "straight")
    seen = latest_checkpoint(tmp_path / "split")
    assert expected.name == seen.name == "step-00000008"
    tensors = everything(expected)
    assert {n.split(".")[0] for n in tensors} == {"master", "muon", "adamw", "balance", "generator"}
    for name, tensor in everything(seen).items():
        assert torch.equal(tensor, tensors[name]), name
    volatile = {"cpu_s", "elapsed_s"}
    for key, value in load_checkpoint(expected).state.items():
        if key not in volatile:
            assert load_checkpoint(seen).state[key] == value, key


def test_another_recipe_cannot_resume(tmp_path: Path) -> None:
    first = tiny_trainer()
    first.step()
    first.save(tmp_path)
    other = dataclasses.replace(tiny_recipe(), schedule=CosineSchedule(peak_lr=1e-3, total_steps=8))
    with pytest.raises(CheckpointError, match="another recipe"):
        tiny_trainer(other).load(latest_checkpoint(tmp_path))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    first = tiny_trainer()
    first.step()
    first.save(tmp_path)
    path = latest_checkpoint(tmp_path)
    (path / "tensors.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="step-00000001"):
        tiny_trainer().load(path)


def test_only_the_newest_checkpoints_stay_and_no_partial_one(tmp_path: Path) -> None:
    run = tiny_trainer()
    for _ in range(4):
        run.step()
        run.save(tmp_path)
    (tmp_path / ".partial-00000009").mkdir()
    assert latest_checkpoint(tmp_path).name == "step-00000004"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("step")) == [
        "step-00000003",
        "step-00000004",
    ]
    assert latest_checkpoint(tmp_path / "absent") is None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The sums of torch depend on the number of threads; each process of a group has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    alone = tiny_trainer(recipe())
    alone.run(lambda m: None, checkpoints=tmp_path / "alone")
    worker = ROOT / "tests" / "train" / "parallel_worker.py"
    meeting, folder = tmp_path / "meeting", tmp_path / "pair"
    commands = [
        [sys.executable, str(worker), str(rank), "2", str(meeting), str(folder)] for rank in (0, 1)
    ]
    children = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    assert [child.wait(timeout=240) for child in children] == [0, 0]
    expected = everything(latest_checkpoint(tmp_path / "alone"))
    seen = everything(latest_checkpoint(folder))
    # the generator belongs to the process; training itself draws nothing from it
    assert seen.keys() == expected.keys()
    for name in seen.keys() - {"generator"}:
        tensor = seen[name]
        assert torch.equal(tensor, expected[name]), name


def test_processes_must_divide_the_shards() -> None:
    class Three(trainer_module.Alone):
        world_size = 3

    with pytest.raises(ConfigError, match="3 processes"):
        tiny_trainer(group=Three())


def test_routing_limited_to_groups_cannot_be_balanced() -> None:
    config = tiny_recipe().model
    assert config.moe is not None
    limited = dataclasses.replace(config.moe, num_expert_group=2, topk_group=1)
    with pytest.raises(ConfigError, match="num_expert_group is 2"):
        tiny_trainer(tiny_recipe(dataclasses.replace(config, moe=limited)))


@pytest.mark.slow
def test_the_loss_falls() -> None:
    steps = 30
    run = tiny_trainer(
        tiny_recipe(schedule=CosineSchedule(peak_lr=2e-2, total_steps=steps, warmup_fraction=0.05))
    )
    losses = []
    run.run(lambda m: losses.append(m.loss))
    assert len(losses) == steps
    # from a uniform guess over the vocabulary to one over the eight letters
    assert losses[0] > 6
    assert sum(losses[-5:]) / 5 < 2.5


def test_metrics_say_what_happened(tmp_path: Path) -> None:
    run = tiny_trainer(recipe())
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        run.run(file.write)
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(1, 9))
    assert [x["quantized"] for x in lines] == [False] * 4 + [True] * 4
    assert all(x["applied"] for x in lines)
    assert lines[-1]["tokens_seen"] == sum(x["tokens"] for x in lines)
    assert all(0 < x["targets"] < x["tokens"] <= 128 for x in lines)
    assert lines[-1]["lr"] == pytest.approx(5e-4)
    assert lines[-1]["eta_s"] == 0
    with MetricsFile(tmp_path / "metrics.jsonl", keep_steps=3):
        pass
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_refused_step_changes_nothing() -> None:
    run = tiny_trainer()
    run.step()
    run.guard.mean = 1e-3
    before = {n: t.clone() for n, t in run.optimizer.named_tensors().items()}
    bias = {n: t.clone() for n, t in run.balancer.state_tensors().items()}
    metrics, _ = run.step()
    assert not metrics.applied
    assert all(torch.equal(t, before[n]) for n, t in run.optimizer.named_tensors().items())
    assert all(torch.equal(t, bias[n]) for n, t in run.balancer.state_tensors().items())
    assert run.step_number == 2


def test_a_gradient_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_trainer()
    run.step()
    before = run.optimizer.flat.values.clone()
    mean = run.guard.mean
    accumulate = run._accumulate

    def poisoned() -> tuple[float, int, int]:
        sums = accumulate()
        run.optimizer.flat.gradients[7] = float("inf")
        return sums

    monkeypatch.setattr(run, "_accumulate", poisoned)
    metrics, _ = run.step()
    assert not metrics.applied
    assert torch.equal(run.optimizer.flat.values, before)
    assert run.guard.mean == mean


def test_a_stop_is_honoured_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    run = tiny_trainer()
    is_complete = run.run(
        lambda m: None, checkpoints=tmp_path, should_stop=lambda: run.step_number >= 2
    )
    assert not is_complete
    assert latest_checkpoint(tmp_path).name == "step-00000003"


def test_streams_lose_no_sample_and_shards_share_none() -> None:
    streams = [ShardStream(copying, 1, shard, 2) for shard in range(2)]
    drawn = [d.ids for stream in streams for _ in range(3) for d in stream.take(50, 0.0)]
    counts = [stream.position for stream in streams]
    expected = [
        tuple(copying(1, shard + 2 * k, 0.0)[0]) for shard in range(2) for k in range(counts[shard])
    ]
    assert drawn == expected


def test_a_sample_longer_than_the_budget_is_an_error() -> None:
    with pytest.raises(ConfigError, match="budget of 4"):
        ShardStream(copying, 1, 0, 1).take(4, 0.0)
