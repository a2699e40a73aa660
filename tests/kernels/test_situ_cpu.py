"""Native gated activations: every level against float64, strided halves, thread counts."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native, _native_ops
from moonlet.kernels.situ import cpu

pytestmark = pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])

# lanes.h computes exp and tanh to about 2e-7; the product of three such factors stays below this
TOLERANCE = 1e-6


@pytest.fixture(params=range(len(_native.isa_levels())), ids=_native.isa_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_native_ops, "level", lambda: request.param)
    return request.param


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def situ64(gate: Tensor, up: Tensor, beta: float, cap: float | None) -> Tensor:
    gate, up = gate.double(), up.double()
    capped = up if cap is None else cap * torch.tanh(up / cap)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * capped


def swiglu64(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate.double()) * up.double()


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple]] = {
    "situ": (cpu.situ_glu, situ64, (4.0, 25.0)),
    "situ uncapped": (cpu.situ_glu, situ64, (1.0, None)),
    "swiglu": (cpu.swiglu, swiglu64, ()),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    fast, slow, arguments = CASES[request.param]
    return (
        lambda gate, up: fast(gate, up, *arguments),
        lambda gate, up: slow(gate, up, *arguments),
    )


def halves(rows: int, size: int, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Gate and up as column ranges of one matrix with ``gap`` more columns."""
    generator = torch.Generator().manual_seed(rows * 1000 + size)
    both = torch.randn(rows, 2 * size + gap, generator=generator)
    return 5 * both[:, :size], 20 * both[:, size : 2 * size]


def relative(seen: Tensor, exact: Tensor) -> float:
    return float(((seen.double() - exact) / exact.abs().clamp(min=1e-30)).abs().max())


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_equals_the_equation(level: int, case: tuple, rows: int) -> None:
    fast, slow = case
    for size in (1, 3, 16, 17, 100, 257, 4096, 9001):
        gate, up = halves(rows, size)
        seen = fast(gate, up)
        assert seen.shape == gate.shape
        assert seen.is_contiguous()
        assert relative(seen, slow(gate, up)) < TOLERANCE, f"size {size}"


@pytest.mark.parametrize("gap", [0, 5])
def test_column_ranges_are_read_in_place(level: int, case: tuple, gap: int) -> None:
    both = torch.randn(7, 2 * 33 + gap, generator=torch.Generator().manual_seed(1))
    gate, up = both[:, :33], both[:, 33:66]
    assert not gate.is_contiguous()
    fast, _ = case
    assert torch.equal(fast(gate, up), fast(gate.contiguous(), up.contiguous()))
    # one side plain, the other strided
    assert torch.equal(fast(gate.contiguous(), up), fast(gate, up.contiguous()))


def test_any_shape_and_layout(level: int, case: tuple) -> None:
    fast, slow = case
    gate, up = torch.randn(3, 5, 7), torch.randn(7, 5, 3).permute(2, 1, 0)
    assert relative(fast(gate, up), slow(gate, up)) < TOLERANCE
    assert fast(gate[0, 0], up[0, 0]).shape == (7,)
    assert fast(gate[:0], up[:0]).shape == (0, 5, 7)
    assert fast(gate[..., 0].T, up[..., 0].T).shape == (5, 3)


def test_extreme_values_stay_finite_and_nan_stays(level: int) -> None:
    gate = torch.tensor([1e30, -1e30, 90.0, -90.0, 0.0, -0.0, torch.nan, 1.0])
    up = torch.tensor([1e30, -1e30, -90.0, 90.0, 3.0, 3.0, 1.0, torch.nan])
    seen, exact = cpu.situ_glu(gate, up, 4.0, 25.0), situ64(gate, up, 4.0, 25.0)
    assert torch.equal(seen.isnan(), exact.isnan())
    # sigmoid(-90) is 8e-40, below the smallest normal float32
    torch.testing.assert_close(seen.double(), exact, rtol=TOLERANCE, atol=1e-36, equal_nan=True)
    seen, exact = cpu.swiglu(gate, torch.ones(8)), swiglu64(gate, torch.ones(8))
    torch.testing.assert_close(
        seen.double()[2:], exact[2:], rtol=TOLERANCE, atol=1e-36, equal_nan=True
    )


def test_small_values_keep_their_relative_precision(level: int) -> None:
    up = torch.tensor([1e-3, -1e-5, 1e-7, 1e-20])
    assert relative(cpu.situ_glu(up, up, 4.0, 25.0), situ64(up, up, 4.0, 25.0)) < TOLERANCE


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize(("rows", "size"), [(1, 30_001), (300, 100), (5, 5000)])
def test_threads_do_not_change_a_bit(case: tuple, rows: int, size: int) -> None:
    fast, _ = case
    gate, up = halves(rows, size)
    torch.set_num_threads(1)
    alone = fast(gate, up)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(fast(gate, up), alone)


def test_refuses_what_the_library_would_misread(case: tuple) -> None:
    fast, _ = case
    with pytest.raises(ShapeError, match="up is torch"):
        fast(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ShapeError, match="float64"):
        fast(torch.zeros(2, 3).double(), torch.zeros(2, 3).double())
    with pytest.raises(ShapeError, match="meta"):
        fast(torch.zeros(2, 3, device="meta"), torch.zeros(2, 3))


def test_the_library_refuses_bad_arguments() -> None:
    library = _native.shared_library()
    x, out = torch.zeros(2, 8), torch.zeros(2, 8)
    pointers = (x.data_ptr(), x.data_ptr(), out.data_ptr())
    call = library.moonlet_swiglu
    assert call(*pointers, 2, 8, 8, 8, 0, 1) == 0
    assert call(*pointers, 2, 8, 7, 8, 0, 1) == 1
    assert call(*pointers, -1, 8, 8, 8, 0, 1) == 1
    assert call(*pointers, 2, 0, 8, 8, 0, 1) == 1
    assert call(*pointers, 2, 8, 8, 8, 0, 0) == 1
    assert call(None, *pointers[1:], 2, 8, 8, 8, 0, 1) == 1
    assert call(*pointers, 2, 8, 8, 8, 9, 1) == 2
