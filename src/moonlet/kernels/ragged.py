"""Index arithmetic of packed sequences: which row belongs to which sequence, and where.

All operators run on packed rows ``[T, ...]`` of S sequences (architecture.md, "Ragged batch").
A `Ragged` is built once per batch and handed to every operator that needs sequence borders.

Letters: T packed rows, S sequences, M longest sequence of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError

__all__ = ["EmitOrder", "Ragged"]


class EmitOrder(NamedTuple):
    """Emitted rows in ascending order, and the place that each was asked for at (int64)."""

    rows_E: Tensor
    places_E: Tensor


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Borders of S sequences packed one after the other.

    Attributes:
        seq_lens: Rows of each sequence, every one positive.
        device: Where the index tensors live.
    """

    seq_lens: tuple[int, ...]
    device: torch.device

    @staticmethod
    def build(seq_lens: Sequence[int], device: torch.device | str = "cpu") -> Ragged:
        """Check the lengths and return the borders.

        Raises:
            ShapeError: No sequence, or a sequence without rows.
        """
        lens = tuple(seq_lens)
        if not lens or min(lens) < 1:
            raise ShapeError(f"seq_lens is {lens}; every sequence needs at least one row")
        return Ragged(seq_lens=lens, device=torch.device(device))

    @staticmethod
    def over(borders_S1: Tensor, seq_lens: Sequence[int]) -> Ragged:
        """Return borders that their owner moves between calls that are made again and again.

        The numbers of rows and sequences stay. ``seq_lens``, and what follows from it, is that of
        the first batch.

        Args:
            borders_S1: int64, read anew by every operator that takes `borders_S1`.
            seq_lens: Rows of each sequence in the first batch.
        """
        ragged = Ragged.build(seq_lens, borders_S1.device)
        # where a cached property keeps its value
        ragged.__dict__["borders_S1"] = borders_S1
        return ragged

    @property
    def num_rows(self) -> int:
        """T."""
        return sum(self.seq_lens)

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.seq_lens)

    @property
    def max_len(self) -> int:
        """M."""
        return max(self.seq_lens)

    @cached_property
    def lens_S(self) -> Tensor:
        """Rows of each sequence, int64."""
        return torch.tensor(self.seq_lens, dtype=torch.int64, device=self.device)

    @cached_property
    def cu_seqlens_S1(self) -> Tensor:
        """Cumulative borders [0, ..., T], int32."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        return torch.cat([zero, self.lens_S.cumsum(0)]).to(torch.int32)

    @cached_property
    def borders_S1(self) -> Tensor:
        """`cu_seqlens_S1` in int64."""
        return self.cu_seqlens_S1.long()

    @cached_property
    def starts_S(self) -> Tensor:
        """First packed row of each sequence, int64."""
        return self.borders_S1[:-1]

    @cached_property
    def seq_of_T(self) -> Tensor:
        """Sequence of each packed row, int64."""
        ids = torch.arange(self.num_seqs, device=self.device)
        return torch.repeat_interleave(ids, self.lens_S)

    @cached_property
    def offset_T(self) -> Tensor:
        """Position of each packed row inside its sequence, int64."""
        return torch.arange(self.num_rows, device=self.device) - self.starts_S[self.seq_of_T]

    def emit_order(self, emit_at_E: Tensor | None) -> EmitOrder | None:
        """Sort the packed rows after which a state is wanted, which may repeat.

        Raises:
            ShapeError: A row is not one of the packed rows, or the rows are no int64 list.
        """
        if emit_at_E is None:
            return None
        if emit_at_E.dtype != torch.int64 or emit_at_E.dim() != 1:
            kind = f"{emit_at_E.dtype} {list(emit_at_E.shape)}"
            raise ShapeError(f"emit_at is {kind}; give the rows as int64 [E]")
        rows_E, places_E = emit_at_E.sort(stable=True)
        if rows_E.numel() and not (rows_E[0] >= 0 and rows_E[-1] < self.num_rows):
            raise ShapeError(f"emit_at names rows outside the batch of {self.num_rows}")
        return EmitOrder(rows_E, places_E)

    @property
    def is_single_rows(self) -> bool:
        """Whether every sequence has exactly one row (a decode batch)."""
        return self.num_rows == self.num_seqs

    def pad(self, x_T: Tensor) -> Tensor:
        """Spread packed rows ``[T, ...]`` into ``[S, M, ...]``, zeros where there is no row."""
        if self.is_single_rows:
            return x_T.unsqueeze(1)
        if self.num_seqs == 1:
            return x_T.unsqueeze(0)
        padded = x_T.new_zeros((self.num_seqs * self.max_len, *x_T.shape[1:]))
        index = self.seq_of_T * self.max_len + self.offset_T
        padded = padded.index_copy(0, index, x_T)
        return padded.view(self.num_seqs, self.max_len, *x_T.shape[1:])

    def unpad(self, x_SM: Tensor) -> Tensor:
        """Collect the rows of ``[S, M, ...]`` back into ``[T, ...]``."""
        if self.is_single_rows:
            return x_SM[:, 0]
        if self.num_seqs == 1:
            return x_SM[0]
        index = self.seq_of_T * self.max_len + self.offset_T
        return x_SM.flatten(0, 1).index_select(0, index)
