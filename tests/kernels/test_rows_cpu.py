"""Embedding, sums and gates of whole rows in native code against their references."""

import pytest
import torch

from moonlet.core.errors import BackendError, ShapeError
from moonlet.kernels.mla import cpu as mla
from moonlet.kernels.mla import reference as mla_reference
from moonlet.kernels.rows import cpu, reference
from tests.kernels.native_cases import error, needs_native, same_bits

pytestmark = needs_native


@pytest.mark.parametrize("size", [1, 3, 17, 100, 257, 70000])
def test_sums_and_gates(level: str, thread_counts: list[int], size: int) -> None:
    a, b = torch.randn(2, 3, size)
    for count in thread_counts:
        torch.set_num_threads(count)
        assert same_bits(cpu.add(a, b), a + b)
        gated = cpu.sigmoid_gate(a, 8 * b)
        expected = reference.sigmoid_gate(a.double(), 8 * b.double())
        # one product after a polynomial exponential: a few units of the last place
        assert error(gated, expected) <= 5e-7
    assert cpu.add(a[:0], b[:0]).shape == (0, size)
    assert same_bits(cpu.add(a.T, b.T), (a + b).T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_rows_are_exact(level: str, dtype: torch.dtype) -> None:
    table = torch.randn(11, 37).to(dtype)
    ids = torch.tensor([10, 0, 3, 3])
    seen = cpu.embed(ids, table, torch.float32)
    assert same_bits(seen, reference.embed(ids, table, torch.float32))
    for wrong in (11, -1):
        with pytest.raises(BackendError):
            cpu.embed(torch.tensor([wrong]), table, torch.float32)


def test_new_rows_go_to_their_pages_and_nowhere_else(level: str) -> None:
    pages = torch.full((5, 3, 10), torch.nan)
    expected = pages.clone()
    wide = torch.randn(4, 16)
    rows = torch.tensor([14, 0, 7, 8])
    # columns of a wider matrix, as a projection leaves them
    for write, target in ((mla.mla_append, pages), (mla_reference.mla_append, expected)):
        write(target, rows, wide[:, :7], wide[:, 13:])
    assert same_bits(pages, expected)
    before = pages.clone()
    with pytest.raises(BackendError):
        mla.mla_append(pages, torch.tensor([1, 15, 2, 3]), wide[:, :7], wide[:, 13:])
    assert same_bits(pages, before)


def test_what_cannot_be_served_is_refused() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ShapeError, match="second input has shape"):
        cpu.add(x, x[:1])
    with pytest.raises(ShapeError, match="first input has dtype"):
        cpu.sigmoid_gate(x.double(), x.double())
    with pytest.raises(ShapeError, match="ids has dtype"):
        cpu.embed(torch.tensor([1], dtype=torch.int32), x, torch.float32)
    with pytest.raises(ShapeError, match="returns float32"):
        cpu.embed(torch.tensor([1]), x, torch.bfloat16)
    with pytest.raises(ShapeError, match="k_shared has shape"):
        mla.mla_append(x.view(1, 2, 8), torch.tensor([0, 1]), x[:, :5], x[:, :2])
