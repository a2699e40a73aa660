"""The native norms for inference against the equations in float64."""

import pytest
import torch

from moonlet.core.errors import ShapeError
from moonlet.kernels.rms_norm import cpu
from tests.kernels.native_cases import error, needs_native, same_bits

pytestmark = needs_native

# float32 sums of up to 7168 squares in lanes: a few units of the last place
CLOSE = 5e-7
EPS = 1e-5


def normed64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("size", [1, 3, 17, 100, 257, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(level: str, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x, gate = torch.randn(2, 5, 3, size, generator=generator)
    # around the epsilon too: rows of very different lengths
    x = x * torch.logspace(-4, 2, 15).view(5, 3, 1)
    weight = torch.randn(size, generator=generator).to(dtype)
    expected = normed64(x, weight)
    seen = cpu.rms_norm(x, weight, EPS)
    assert seen.dtype == torch.float32
    assert error(seen, expected) <= CLOSE
    gated = cpu.gated_rms_norm(x, weight, 8 * gate, EPS)
    assert error(gated, expected * torch.sigmoid(8 * gate.double())) <= CLOSE


def test_strided_rows_and_no_rows(level: str) -> None:
    x, gate, weight = torch.randn(6, 40), torch.randn(6, 40), torch.randn(20)
    x, gate = x[:, ::2], gate[:, 20:]
    assert error(cpu.rms_norm(x, weight, EPS), normed64(x, weight)) <= CLOSE
    expected = normed64(x, weight) * torch.sigmoid(gate.double())
    assert error(cpu.gated_rms_norm(x, weight, gate, EPS), expected) <= CLOSE
    assert cpu.rms_norm(x[:0], weight, EPS).shape == (0, 20)


def test_threads_do_not_change_a_bit(level: str, thread_counts: list[int]) -> None:
    x, gate, weight = torch.randn(700, 333), torch.randn(700, 333), torch.randn(333)
    seen = []
    for count in thread_counts:
        torch.set_num_threads(count)
        seen.append([cpu.rms_norm(x, weight, EPS), cpu.gated_rms_norm(x, weight, gate, EPS)])
    for other in seen[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, seen[0], strict=True))


def test_what_cannot_be_served_is_refused() -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(ShapeError, match="x has dtype"):
        cpu.rms_norm(x.bfloat16(), weight, EPS)
    with pytest.raises(ShapeError, match="x has shape"):
        cpu.rms_norm(x, weight[:7], EPS)
    with pytest.raises(ShapeError, match="gate has shape"):
        cpu.gated_rms_norm(x, weight, x[:1], EPS)


def test_columns_of_a_wider_matrix_are_read_where_they_lie(level: str) -> None:
    wide, weight = torch.randn(9, 50), torch.randn(33)
    seen = cpu.rms_norm(wide[:, 7:40], weight, EPS)
    assert same_bits(seen, cpu.rms_norm(wide[:, 7:40].contiguous(), weight, EPS))
    assert error(seen, normed64(wide[:, 7:40], weight)) <= CLOSE
