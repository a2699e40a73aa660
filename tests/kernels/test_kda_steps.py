"""Chunked Kimi Delta Attention takes one recurrent step per chunk, not one per row."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moonlet.kernels.kda import reference
from moonlet.kernels.kda.chunkwise import chunk_size_for, kda_chunk
from tests.kernels.native_cases import kda_case

BOUND = -5.0


class _Count(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def num_operators(call: Callable[..., Any], rows: int) -> int:
    case = kda_case([rows], BOUND)
    with _Count() as counter, torch.no_grad():
        call(*case.inputs, BOUND, case.state, case.ragged)
    return counter.count


def test_operators_grow_with_chunks_and_not_with_rows() -> None:
    size = chunk_size_for(BOUND)
    assert size > 16
    counts = [num_operators(kda_chunk, n * size) for n in (10, 20, 40)]
    per_chunk = (counts[1] - counts[0]) / 10
    assert counts[2] - counts[1] == 20 * per_chunk
    rows = [num_operators(reference.kda_chunk, n) for n in (20, 40)]
    # the recurrence takes its operators for every row
    assert per_chunk < size * (rows[1] - rows[0]) / 20 / 4
    # rows that fill no further chunk cost nothing
    assert num_operators(kda_chunk, 10 * size - size // 2) == counts[0]
