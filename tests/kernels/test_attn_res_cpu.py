"""Native AttnRes of inference: both forms at every level against float64, and thread counts."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moonlet.core.errors import BackendError, ShapeError
from moonlet.kernels import _native, _native_ops
from moonlet.kernels.attn_res import cpu, reference

pytestmark = pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])

# float32 sums of up to 7168 products and exp to 2e-7, over outputs of size 1
TOLERANCE = 3e-6
SIZES = (1, 3, 16, 17, 100, 257, 7168)


@pytest.fixture(params=range(len(_native.isa_levels())), ids=_native.isa_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_native_ops, "level", lambda: request.param)
    return request.param


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def case(num_sources: int, rows: int, size: int, sublayers: int = 1) -> tuple[list[Tensor], Tensor]:
    """Sources of very different lengths, and weights that give scores of a few units."""
    generator = torch.Generator().manual_seed(num_sources * 10_000 + rows * 100 + size)
    sources = [
        torch.randn(rows, size, generator=generator) * 10.0 ** (n % 3 - 1)
        for n in range(num_sources)
    ]
    weight = torch.randn(sublayers, size, generator=generator) * 2.0 / size**0.5
    return sources, weight


def mix64(sources: list[Tensor], weight_D: Tensor, eps: float = 1e-5) -> Tensor:
    stacked = torch.stack(sources).double()
    rms = torch.rsqrt(stacked.square().mean(-1) + eps)
    weights = torch.softmax((stacked @ weight_D.double()) * rms, dim=0)
    return (weights[..., None] * stacked).sum(0)


def error(seen: Tensor, exact: Tensor) -> float:
    return float((seen.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("num_sources", [2, 3, 9, 18, 64])
def test_the_mix_equals_the_equation(level: int, num_sources: int) -> None:
    for size in SIZES:
        sources, weight = case(num_sources, 3, size)
        seen = cpu.attn_res_mix(sources[:-1], sources[-1], weight[0], 1e-5)
        assert error(seen, mix64(sources, weight[0])) < TOLERANCE, f"size {size}"


@pytest.mark.parametrize("sublayers", [1, 3, 4, 7, 24])
def test_two_phases_equal_the_equation(level: int, sublayers: int) -> None:
    for size in SIZES:
        for num_sources in (2, 5, 9):
            sources, weight = case(num_sources, 3, size, sublayers)
            fold = cpu.attn_res_fold(sources[:-1], weight, 1e-5)
            for index in range(sublayers):
                seen = cpu.attn_res_join(fold, index, sources[-1], 1e-5)
                exact = mix64(sources, weight[index])
                assert error(seen, exact) < TOLERANCE, f"size {size} sublayer {index}"


def test_a_fold_equals_the_reference(level: int) -> None:
    for rows in (1, 2, 5):
        sources, weight = case(4, rows, 100, 6)
        seen, wanted = (f.attn_res_fold(sources, weight, 1e-5) for f in (cpu, reference))
        for part, expected in zip(seen, wanted, strict=True):
            torch.testing.assert_close(part, expected, rtol=3e-6, atol=3e-6)


def test_a_large_score_does_not_overflow(level: int) -> None:
    sources, weight = case(3, 2, 64)
    seen = cpu.attn_res_mix(sources[:-1], sources[-1], weight[0] * 1e4, 1e-5)
    assert error(seen, mix64(sources, weight[0] * 1e4)) < TOLERANCE
    fold = cpu.attn_res_fold(sources[:-1], weight * 1e4, 1e-5)
    seen = cpu.attn_res_join(fold, 0, sources[-1], 1e-5)
    assert error(seen, mix64(sources, weight[0] * 1e4)) < TOLERANCE


def test_a_zero_source_is_weighed_like_any_other(level: int) -> None:
    sources, weight = case(3, 2, 48)
    sources[1] = torch.zeros(2, 48)
    seen = cpu.attn_res_mix(sources[:-1], sources[-1], weight[0], 1e-5)
    assert error(seen, mix64(sources, weight[0])) < TOLERANCE


def test_a_row_does_not_depend_on_its_neighbours(level: int) -> None:
    sources, weight = case(6, 9, 130, 5)
    whole = cpu.attn_res_fold(sources[:-1], weight, 1e-5)
    mixed = cpu.attn_res_mix(sources[:-1], sources[-1], weight[1], 1e-5)
    for row in (0, 4, 8):
        parts = [x[row : row + 1] for x in sources]
        alone = cpu.attn_res_fold(parts[:-1], weight, 1e-5)
        assert torch.equal(alone.acc_MTD[:, 0], whole.acc_MTD[:, row])
        assert torch.equal(alone.m_MT[:, 0], whole.m_MT[:, row])
        assert torch.equal(alone.l_MT[:, 0], whole.l_MT[:, row])
        assert torch.equal(cpu.attn_res_mix(parts[:-1], parts[-1], weight[1], 1e-5)[0], mixed[row])
        joined = cpu.attn_res_join(alone, 1, parts[-1], 1e-5)
        assert torch.equal(joined[0], cpu.attn_res_join(whole, 1, sources[-1], 1e-5)[row])


def test_strided_tensors_are_read_right(level: int) -> None:
    sources, weight = case(3, 6, 40, 3)
    strided = [torch.stack([x, x], dim=-1)[..., 0] for x in sources]
    plain = cpu.attn_res_mix(sources[:-1], sources[-1], weight[0], 1e-5)
    assert torch.equal(cpu.attn_res_mix(strided[:-1], strided[-1], weight[0], 1e-5), plain)
    seen = cpu.attn_res_fold(strided[:-1], weight.T.contiguous().T, 1e-5)
    wanted = cpu.attn_res_fold(sources[:-1], weight, 1e-5)
    assert torch.equal(seen.acc_MTD, wanted.acc_MTD)
    joined = cpu.attn_res_join(seen, 2, strided[-1], 1e-5)
    assert torch.equal(joined, cpu.attn_res_join(wanted, 2, sources[-1], 1e-5))


def test_no_blocks_give_the_prefix_and_no_rows_give_none() -> None:
    prefix = torch.randn(2, 5)
    assert cpu.attn_res_mix([], prefix, torch.ones(5), 1e-5) is prefix
    empty = torch.zeros(0, 5)
    assert cpu.attn_res_mix([empty], empty, torch.ones(5), 1e-5).shape == (0, 5)
    fold = cpu.attn_res_fold([empty], torch.ones(2, 5), 1e-5)
    assert cpu.attn_res_join(fold, 1, empty, 1e-5).shape == (0, 5)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize(("rows", "size"), [(1, 7168), (33, 500), (200, 64)])
def test_threads_do_not_change_a_bit(rows: int, size: int) -> None:
    sources, weight = case(7, rows, size, 11)

    def run() -> list[Tensor]:
        fold = cpu.attn_res_fold(sources[:-1], weight, 1e-5)
        joined = [cpu.attn_res_join(fold, i, sources[-1], 1e-5) for i in range(11)]
        return [*fold, *joined, cpu.attn_res_mix(sources[:-1], sources[-1], weight[0], 1e-5)]

    torch.set_num_threads(1)
    alone = run()
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(alone, run(), strict=True))


def test_refuses_what_the_library_would_misread() -> None:
    sources, weight = case(3, 2, 8)
    with pytest.raises(ShapeError, match="source"):
        cpu.attn_res_mix([sources[0][:1]], sources[1], weight[0], 1e-5)
    with pytest.raises(ShapeError, match="float64"):
        cpu.attn_res_mix(sources[:1], sources[1].double(), weight[0], 1e-5)
    with pytest.raises(ShapeError, match="weight"):
        cpu.attn_res_mix(sources[:1], sources[1], weight[0, :7], 1e-5)
    with pytest.raises(ShapeError, match="meta"):
        cpu.attn_res_fold([sources[0].to("meta")], weight, 1e-5)
    fold = cpu.attn_res_fold(sources[:2], weight, 1e-5)
    with pytest.raises(ShapeError, match="prefix"):
        cpu.attn_res_join(fold, 0, sources[2][:1], 1e-5)
    with pytest.raises(ShapeError, match="sublayer 1"):
        cpu.attn_res_join(fold, 1, sources[2], 1e-5)
    with pytest.raises(BackendError):
        cpu.attn_res_fold(sources * 22, weight, 1e-5)
