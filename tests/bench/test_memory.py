from pathlib import Path

import pytest
import torch

from moonlet.bench import memory
from moonlet.bench.bounds import Bounds
from moonlet.bench.costs import Cost
from moonlet.kernels import probe

PLAUSIBLE = (1e7, 1e13)


@pytest.fixture(params=["native", "torch"])
def probed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(probe, "is_available", lambda: False)
    elif not probe.is_available():
        pytest.skip("the native library is not built")
    return request.param


def test_bandwidth_is_that_of_a_memory(probed_by: str) -> None:
    assert PLAUSIBLE[0] < memory.read_bandwidth(repeats=1) < PLAUSIBLE[1]


def test_samples_go_through_the_whole_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def read(data: torch.Tensor) -> float:
        seen.append((data.data_ptr(), data.nbytes))
        return 0.0

    monkeypatch.setattr(probe, "probe_read", read)
    monkeypatch.setattr(probe, "is_available", lambda: True)
    reader = memory.ReadProbe(4004)
    for _ in range(5):
        reader.sample()
    assert sum(size for _, size in seen[:4]) == 4004
    assert len({pointer for pointer, _ in seen[:4]}) == 4
    assert seen[4] == seen[0]


def test_the_largest_reported_cache_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name, size in (("index0", "48K"), ("index2", "2048K"), ("index3", "3M"), ("index4", "?")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(f"{size}\n")
    assert memory.last_level_cache_bytes(tmp_path) == 3 << 20
    assert memory.last_level_cache_bytes(tmp_path / "none") == 0


def test_cold_is_more_than_the_cache_and_less_than_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert memory.cold_bytes() == memory.DEFAULT_COLD_BYTES
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 3 << 20)
    assert memory.cold_bytes() == 6 << 20
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 1 << 50)
    assert memory.cold_bytes() < 1 << 50


def test_shared_memory_counts_once() -> None:
    whole = torch.zeros(100)
    assert memory.storage_bytes([whole, whole[:10], whole.view(10, 10)]) == 400
    assert memory.storage_bytes([whole, whole.clone()]) == 800


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = memory.resident_bytes()
    block = torch.ones(64 << 18)
    assert memory.resident_bytes() - before > 0.9 * block.nbytes


def test_a_bound_is_the_slower_of_memory_and_arithmetic(
    probed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = Bounds(1 << 16)
    bounds.sample()
    bounds.sample()
    report = bounds.to_json()
    assert report["probe"] == probed_by
    assert report["probe_samples"] == bounds.mark == 2
    assert PLAUSIBLE[0] < report["fma_flops_per_s"] < PLAUSIBLE[1] * 100
    assert len(report["load_average"]) == 2
    monkeypatch.setattr(bounds, "_bandwidths", [10.0, 1000.0, 10.0])
    monkeypatch.setattr(bounds, "_peaks", [100.0, 100.0, 400.0])
    by_memory = bounds.relate(Cost(100, 200), 20.0)
    assert (by_memory["bound_s"], by_memory["bound_by"], by_memory["ratio"]) == (10, "memory", 0.5)
    assert (by_memory["bytes_per_s"], by_memory["flops_per_s"]) == (5, 10)
    by_compute = bounds.relate(Cost(100, 2000), 40.0)
    assert (by_compute["bound_s"], by_compute["bound_by"]) == (20, "compute")
    # only the samples of the measurement's own turns
    late = bounds.relate(Cost(100, 2000), 40.0, since=2)
    assert (late["bound_s"], late["bound_by"]) == (10, "memory")
    assert bounds.relate(Cost(1010, 0), 4.0)["bound_s"] == 101
    assert bounds.relate(Cost(1010, 0), 4.0, since=1)["bound_s"] == 2
