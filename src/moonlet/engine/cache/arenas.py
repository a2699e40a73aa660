"""The bytes behind slots and pages, laid out as the layers read them.

A `KDAArena` keeps one layer's recurrent states and convolution tails by slot; an `MLAArena` keeps
one layer's latent rows by page. Fresh memory is never trusted: a slot counts as zero until its
sequence has stored something, and of a page only the rows below a sequence's length are read, so
neither what the allocator left nor what a former owner wrote (possibly NaN) can reach a result.

Letters as in `model.state`; G slots or pages, B pages per sequence, L rows per page, C row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonlet.core.config import KDAConfig, MLAConfig
from moonlet.core.errors import ShapeError
from moonlet.engine.cache.pages import NULL_PAGE
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.registry import resolve_operator
from moonlet.model.state import BatchMeta, KDASlots

__all__ = ["BlockTables", "KDAArena", "MLAArena", "StepIndex"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepIndex:
    """Where the rows of one batch live: computed once per step, used by every layer.

    Attributes:
        meta: The batch.
        fresh_S: Which sequences start at position 0; None where none does.
        settled_S: Indices of the sequences that are not tentative; None where all are settled.
        rows_T: Row of each packed token in an arena flattened to ``[pages * L]``.
        table_SB: Pages of each sequence, at least as many as the longest one needs.
        lengths_S: Rows of each sequence after this batch.
    """

    meta: BatchMeta
    fresh_S: Tensor | None
    settled_S: Tensor | None
    rows_T: Tensor
    table_SB: Tensor
    lengths_S: Tensor

    @staticmethod
    def of(meta: BatchMeta, table_GB: Tensor, page_size: int) -> StepIndex:
        """Look the batch up in the block tables.

        Raises:
            ShapeError: A row lies beyond the pages of its sequence.
        """
        starts = meta.start_positions_S
        fresh_S = starts == 0
        lengths_S = starts + meta.ragged.lens_S
        pages_SB = table_GB.index_select(0, meta.slots_S)
        positions_T = meta.positions_T
        owner_T = pages_SB.index_select(0, meta.ragged.seq_of_T)
        page_T = owner_T.gather(1, (positions_T // page_size).unsqueeze(1)).squeeze(1)
        if bool((page_T == NULL_PAGE).any()):
            raise ShapeError("a row lies beyond the pages that its sequence was given")
        num_pages = -(-int(lengths_S.max()) // page_size)
        return StepIndex(
            meta=meta,
            fresh_S=fresh_S if bool(fresh_S.any()) else None,
            settled_S=(~meta.tentative_S).nonzero()[:, 0] if any(meta.tentative) else None,
            rows_T=page_T * page_size + positions_T % page_size,
            table_SB=pages_SB[:, :num_pages].contiguous(),
            lengths_S=lengths_S,
        )


class BlockTables:
    """Which pages belong to the sequence in each slot, as one tensor.

    Args:
        num_slots: Slots 1..num_slots.
        pages_per_seq: Pages of the longest possible sequence.
        page_size: Rows per page.
        device: Where the arenas live.
    """

    def __init__(
        self, num_slots: int, pages_per_seq: int, page_size: int, device: torch.device | str
    ) -> None:
        self.page_size = page_size
        shape = (num_slots + 1, pages_per_seq)
        self.table_GB = torch.full(shape, NULL_PAGE, dtype=torch.int64, device=device)
        self._index: StepIndex | None = None

    def bind(self, slot: int, pages: Sequence[int]) -> None:
        """Give the slot its pages, in order of position."""
        row_B = self.table_GB[slot]
        row_B.fill_(NULL_PAGE)
        row_B[: len(pages)] = torch.tensor(pages, dtype=torch.int64, device=row_B.device)
        self._index = None

    def release(self, slot: int) -> None:
        """Forget the slot's pages."""
        self.table_GB[slot] = NULL_PAGE
        self._index = None

    def index(self, meta: BatchMeta) -> StepIndex:
        """Return the batch's index, the same object for every layer of one step."""
        if self._index is None or self._index.meta is not meta:
            self._index = StepIndex.of(meta, self.table_GB, self.page_size)
        return self._index

    def use(self, index: StepIndex) -> None:
        """Take an index that the caller keeps up to date instead of looking its batch up."""
        self._index = index

    def pages_of(self, slot: int) -> list[int]:
        """Pages bound to the slot."""
        return [page for page in self.table_GB[slot].tolist() if page != NULL_PAGE]


class KDAArena:
    """One KDA layer: ``recurrent_GHKV`` float32 and ``conv_GCW``, slot 0 unused.

    States of a tentative window wait beside the arena until `commit` picks one per sequence.
    """

    def __init__(
        self,
        kda: KDAConfig,
        num_slots: int,
        tables: BlockTables,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        heads, width = kda.num_heads, kda.head_dim
        channels = 3 * kda.projection_size
        taps = kda.short_conv_kernel_size - 1
        self.recurrent_GHKV = torch.empty(num_slots + 1, heads, width, width, device=device)
        self.conv_GCW = torch.empty(num_slots + 1, channels, taps, dtype=dtype, device=device)
        self._tables = tables
        self._pending: tuple[Tensor, Tensor] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a tentative window waits for `commit`."""
        return self._pending is not None

    def load_conv(self, meta: BatchMeta) -> Tensor:
        """Copy the carries of the batch's slots; zeros for sequences that start now."""
        fresh_S = self._open(meta)
        conv_SCW = self.conv_GCW.index_select(0, meta.slots_S)
        return conv_SCW if fresh_S is None else conv_SCW.masked_fill_(fresh_S[:, None, None], 0.0)

    def load(self, meta: BatchMeta) -> Tensor:
        """Copy the states of the batch's slots; zeros for sequences that start now."""
        fresh_S = self._open(meta)
        recurrent_SHKV = self.recurrent_GHKV.index_select(0, meta.slots_S)
        if fresh_S is not None:
            recurrent_SHKV.masked_fill_(fresh_S[:, None, None, None], 0.0)
        return recurrent_SHKV

    def in_place(self, meta: BatchMeta) -> KDASlots:
        """Return the arena and the batch's slots; those of sequences that start now are cleared."""
        fresh_S = self._open(meta)
        if fresh_S is not None:
            self.recurrent_GHKV.index_fill_(0, meta.slots_S[fresh_S], 0.0)
            self.conv_GCW.index_fill_(0, meta.slots_S[fresh_S], 0.0)
        return KDASlots(self.recurrent_GHKV, self.conv_GCW, meta.slots_S)

    def _open(self, meta: BatchMeta) -> Tensor | None:
        """Return which sequences start now, None where none does, after the check of windows."""
        if self._pending is not None:
            raise ShapeError("a tentative window was neither committed nor discarded")
        return self._tables.index(meta).fresh_S

    def store(
        self,
        meta: BatchMeta,
        recurrent_SHKV: Tensor,
        conv_SCW: Tensor,
        emitted_EHKV: Tensor | None,
        emitted_conv_ECW: Tensor | None,
    ) -> None:
        """Write settled sequences to their slots; keep emitted states for `commit`."""
        settled_S = self._tables.index(meta).settled_S
        if settled_S is None:
            self._write(meta.slots_S, recurrent_SHKV, conv_SCW)
            return
        if emitted_EHKV is None or emitted_conv_ECW is None:
            raise ShapeError("a tentative window was stored without its emitted states")
        self._write(
            meta.slots_S[settled_S],
            recurrent_SHKV.index_select(0, settled_S),
            conv_SCW.index_select(0, settled_S),
        )
        self._pending = (emitted_EHKV, emitted_conv_ECW)

    def commit(self, slots: Tensor, rows: Tensor) -> None:
        """Move the emitted states at ``rows`` into ``slots`` and drop the others."""
        if self._pending is None:
            raise ShapeError("commit without a tentative window")
        (emitted_EHKV, emitted_conv_ECW), self._pending = self._pending, None
        self._write(slots, emitted_EHKV.index_select(0, rows), emitted_conv_ECW[rows])

    def discard(self) -> None:
        """Drop a pending window: the slots keep what they held before it."""
        self._pending = None

    def _write(self, slots: Tensor, recurrent_SHKV: Tensor, conv_SCW: Tensor) -> None:
        self.recurrent_GHKV.index_copy_(0, slots, recurrent_SHKV.detach())
        self.conv_GCW.index_copy_(0, slots, conv_SCW.detach().to(self.conv_GCW.dtype))


class MLAArena:
    """One Gated MLA layer: pages of rows ``[latent | shared key]``, page 0 all zero."""

    def __init__(
        self,
        mla: MLAConfig,
        num_pages: int,
        tables: BlockTables,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_pages + 1, tables.page_size, mla.cache_size)
        self.pages_GLC = torch.empty(shape, dtype=dtype, device=device)
        self.pages_GLC[NULL_PAGE] = 0
        self._latent_size = mla.kv_lora_rank
        self._tables = tables
        self._append = resolve_operator("mla_append", device, dtype)

    def append(self, meta: BatchMeta, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
        """Write the batch's rows to the pages of their sequences."""
        self._append(self.pages_GLC, self._tables.index(meta).rows_T, latent_TR, k_shared_TP)

    def view(self, meta: BatchMeta) -> LatentPages:
        """Return the arena itself and the batch's part of the block table; nothing is copied."""
        index = self._tables.index(meta)
        return LatentPages(
            rows_GLC=self.pages_GLC,
            table_SB=index.table_SB,
            lengths_S=index.lengths_S,
            latent_size=self._latent_size,
        )
