"""The probes do the work that they say they do, at every level and for any number of threads."""

import pytest
import torch

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native, _native_ops, probe

pytestmark = pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])

LEVELS = _native.isa_levels()
# float32 values of a register at each level
WIDTHS = {"scalar": 4, "avx2": 8, "avx512": 16, "vnni": 16}
CHAINS = 12


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(_native_ops, "level", lambda: LEVELS.index(request.param))
    return request.param


def read(data: torch.Tensor, piece: int, isa: int, num_threads: int = 1) -> torch.Tensor:
    """Sums of the pieces; `torch.empty` is poisoned in tests."""
    sums = torch.empty(-(-data.numel() // piece))
    pointers = (data.data_ptr(), sums.data_ptr())
    library = _native.shared_library()
    assert library.moonlet_probe_read(*pointers, data.numel(), piece, isa, num_threads) == 0
    return sums


@pytest.mark.parametrize("piece", [1, 17, 192, 1000])
@pytest.mark.parametrize("count", [1, 3, 47, 100, 257, 4001])
def test_every_value_is_read_once(level: str, count: int, piece: int) -> None:
    # whole numbers below 2^24 in any order of summation: exact
    data = torch.randint(-1000, 1000, (count,)).float()
    want = torch.stack([part.double().sum() for part in data.split(piece)])
    assert torch.equal(read(data, piece, LEVELS.index(level)).double(), want)


def test_the_sums_do_not_depend_on_the_threads(level: str) -> None:
    data = torch.randn(10_007)
    alone = read(data, 333, LEVELS.index(level))
    for num_threads in (2, 3, 4):
        assert torch.equal(read(data, 333, LEVELS.index(level), num_threads), alone)


def test_the_wrapper_reads_the_whole_buffer(level: str) -> None:
    data = torch.ones(probe.READ_PIECE + 5)
    assert probe.probe_read(data) == data.numel()
    with pytest.raises(ShapeError, match="float64"):
        probe.probe_read(data.double())
    with pytest.raises(ShapeError, match="contiguous"):
        probe.probe_read(data[::2])


@pytest.mark.parametrize("count", [12, 24, 120])
def test_as_many_multiply_adds_happen_as_were_asked_for(level: str, count: int) -> None:
    # chain c starts at c + 2 and each multiply-add takes it a quarter nearer to 1
    rounds = count * 16 // WIDTHS[level] // CHAINS
    want = 1 + (CHAINS + 1) / 2 * 0.75**rounds
    out = torch.empty(3)
    library = _native.shared_library()
    assert library.moonlet_probe_fma(out.data_ptr(), 3, count, LEVELS.index(level), 2) == 0
    # one rounding of 6e-8 per multiply-add, damped by 3/4 each
    assert out.sub(want).abs().max() <= 1e-6


def test_the_wrapper_counts_two_operations_per_lane(level: str) -> None:
    assert probe.probe_fma(2) == 2 * probe.FMA_BLOCK * 16 * 2


def test_bad_arguments_are_refused() -> None:
    library = _native.shared_library()
    data, out = torch.ones(64), torch.ones(64)
    pointers = (data.data_ptr(), out.data_ptr())
    assert library.moonlet_probe_read(*pointers, 64, 16, 0, 1) == 0
    assert library.moonlet_probe_read(None, pointers[1], 64, 16, 0, 1) == 1
    assert library.moonlet_probe_read(pointers[0], None, 64, 16, 0, 1) == 1
    assert library.moonlet_probe_read(*pointers, 0, 16, 0, 1) == 1
    assert library.moonlet_probe_read(*pointers, 64, 0, 0, 1) == 1
    assert library.moonlet_probe_read(*pointers, 64, 16, 0, 0) == 1
    assert library.moonlet_probe_read(*pointers, 64, 16, 9, 1) == 2
    assert library.moonlet_probe_fma(pointers[1], 1, 12, 0, 1) == 0
    assert library.moonlet_probe_fma(None, 1, 12, 0, 1) == 1
    assert library.moonlet_probe_fma(pointers[1], 0, 12, 0, 1) == 1
    assert library.moonlet_probe_fma(pointers[1], 1, 13, 0, 1) == 1
    assert library.moonlet_probe_fma(pointers[1], 1, 0, 0, 1) == 1
    assert library.moonlet_probe_fma(pointers[1], 1, 12, 0, 0) == 1
    assert library.moonlet_probe_fma(pointers[1], 1, 12, -1, 1) == 2
