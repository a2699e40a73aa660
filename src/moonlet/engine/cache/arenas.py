"""The bytes behind slots and pages, laid out as the layers read them.

A `KDAArena` keeps one layer's recurrent states and convolution tails by slot; an `MLAArena` keeps
one layer's latent rows by page. Fresh memory is never trusted: a slot counts as zero until its
sequence has stored something, and of a page only the rows below a sequence's length are read, so
neither what the allocator left nor what a former owner wrote (possibly NaN) can reach a result.

Letters as in `model.state`; G slots or pages, B pages per sequence, L rows per page, C row width,
Y bytes. What leaves or enters an arena as bytes keeps its bit patterns; `cache.state` says how the
bytes of all layers are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonlet.core.config import KDAConfig, MLAConfig
from moonlet.core.errors import ShapeError
from moonlet.engine.cache.blocks import NULL_BLOCK
from moonlet.engine.cache.windows import (
    EmittedStates,
    KeptInputs,
    KeptRows,
    Rollback,
    WindowRows,
)
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.registry import resolve_operator
from moonlet.model.state import BatchMeta, KDASlots, KDAWindow

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
        table_TB: Pages per row, where the caller keeps them for batches of windows.
        seen_T: Context of each row, itself included; likewise.
        holds_results: Whether what the batch computes stays until its windows are settled.
    """

    meta: BatchMeta
    fresh_S: Tensor | None
    settled_S: Tensor | None
    rows_T: Tensor
    table_SB: Tensor
    lengths_S: Tensor
    table_TB: Tensor | None = None
    seen_T: Tensor | None = None
    holds_results: bool = False

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
        if bool((page_T == NULL_BLOCK).any()):
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

    Attributes:
        version: Grows with every change.
    """

    def __init__(
        self, num_slots: int, pages_per_seq: int, page_size: int, device: torch.device | str
    ) -> None:
        self.page_size = page_size
        shape = (num_slots + 1, pages_per_seq)
        self.table_GB = torch.full(shape, NULL_BLOCK, dtype=torch.int64, device=device)
        self.version = 0
        self._index: StepIndex | None = None

    def bind(self, slot: int, pages: Sequence[int]) -> None:
        """Give the slot its pages, in order of position."""
        row_B = self.table_GB[slot]
        row_B.fill_(NULL_BLOCK)
        row_B[: len(pages)] = torch.tensor(pages, dtype=torch.int64, device=row_B.device)
        self.version += 1
        self._index = None

    def release(self, slot: int) -> None:
        """Forget the slot's pages."""
        self.table_GB[slot] = NULL_BLOCK
        self.version += 1
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
        return [page for page in self.table_GB[slot].tolist() if page != NULL_BLOCK]


class KDAArena:
    """One KDA layer: ``recurrent_GHKV`` float32 and ``conv_GCW``, slot 0 unused.

    A tentative window waits beside the arena until `commit`: with ``replay`` the projected inputs
    of its rows, with ``snapshot`` the state after every row.
    """

    def __init__(
        self,
        kda: KDAConfig,
        num_slots: int,
        tables: BlockTables,
        dtype: torch.dtype,
        device: torch.device | str,
        rollback: Rollback = "replay",
    ) -> None:
        heads, width = kda.num_heads, kda.head_dim
        channels = 3 * kda.projection_size
        taps = kda.short_conv_kernel_size - 1
        self.recurrent_GHKV = torch.empty(num_slots + 1, heads, width, width, device=device)
        self.conv_GCW = torch.empty(num_slots + 1, channels, taps, dtype=dtype, device=device)
        self._tables = tables
        self._rows = WindowRows() if rollback == "replay" else None
        self._pending: KeptInputs | EmittedStates | None = None

    @property
    def keeps_inputs(self) -> bool:
        """Whether windows are rolled back by replay."""
        return self._rows is not None

    @property
    def window_bytes(self) -> int:
        """Bytes that windows take: the buffers of their inputs, or the states of an open window."""
        if self._rows is not None:
            return self._rows.num_bytes
        return self._pending.num_bytes if isinstance(self._pending, EmittedStates) else 0

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

    def read_slot(self, slot: int) -> Tensor:
        """Copy a slot as ``state_HY``, uint8: per head its recurrent state, then its carries.

        The carries of a head are those of its query, key and value channels in this order, so
        the bytes of one head are complete in themselves (hybrid-cache.md sections 2 and 13).
        """
        recurrent_HKV = self.recurrent_GHKV[slot]
        num_heads = recurrent_HKV.shape[0]
        carries_HDW = self.conv_GCW[slot].unflatten(0, (3, num_heads, -1)).transpose(0, 1)
        return torch.cat(
            [
                recurrent_HKV.flatten(1).view(torch.uint8),
                carries_HDW.reshape(num_heads, -1).view(torch.uint8),
            ],
            dim=1,
        )

    def write_slot(self, slot: int, state_HY: Tensor) -> None:
        """Overwrite a slot with what `read_slot` returned."""
        recurrent_HY = self.recurrent_GHKV[slot].flatten(1).view(torch.uint8)
        recurrent_HY.copy_(state_HY[:, : recurrent_HY.shape[1]])
        conv_CY = self.conv_GCW[slot].view(torch.uint8)
        carries_HY = state_HY[:, recurrent_HY.shape[1] :]
        carries_3HY = carries_HY.unflatten(1, (3, -1)).transpose(0, 1)
        conv_CY.copy_(carries_3HY.reshape(conv_CY.shape))

    def copy_slot(self, source: int, target: int) -> None:
        """Overwrite one slot with another."""
        self.recurrent_GHKV[target].copy_(self.recurrent_GHKV[source])
        self.conv_GCW[target].copy_(self.conv_GCW[source])

    def keep(self, meta: BatchMeta, rows: KDAWindow, replay: Callable[..., None]) -> KDAWindow:
        """Keep the tentative rows; `commit` runs the ones that stay again."""
        if self._rows is None:
            raise ShapeError("an arena with rollback='snapshot' keeps no inputs of windows")
        holds = self._tables.index(meta).holds_results and all(meta.tentative)
        kept = rows if holds else self._rows.copy(meta, rows)
        self._pending = KeptInputs(meta=meta, rows=kept, replay=replay)
        return kept

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
        """Write settled sequences to their slots; hold emitted states for `commit`."""
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
        self._pending = EmittedStates(
            meta=meta, recurrent_EHKV=emitted_EHKV.detach(), conv_ECW=emitted_conv_ECW.detach()
        )

    def is_finite(self, slot: int) -> bool:
        """Whether a slot holds numbers only."""
        parts = (self.recurrent_GHKV[slot], self.conv_GCW[slot])
        return all(bool(torch.isfinite(part).all()) for part in parts)

    def check_window(self, meta: BatchMeta) -> None:
        """Raise `ShapeError` unless the windows of this very batch wait for `commit`."""
        if self._pending is None:
            raise ShapeError("commit without a tentative window")
        if self._pending.meta is not meta:
            raise ShapeError("commit of a batch whose windows are not the open ones")

    def commit(self, meta: BatchMeta, kept: KeptRows) -> None:
        """Leave the slots after the last row that stays and drop the windows."""
        self.check_window(meta)
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.commit(self.recurrent_GHKV, self.conv_GCW, kept)

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
        self.pages_GLC[NULL_BLOCK] = 0
        self._latent_size = mla.kv_lora_rank
        self._tables = tables
        self._append = resolve_operator("mla_append", device, dtype)

    def append(self, meta: BatchMeta, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
        """Write the batch's rows to the pages of their sequences."""
        self._append(self.pages_GLC, self._tables.index(meta).rows_T, latent_TR, k_shared_TP)

    def is_finite(self, page: int, start: int, stop: int) -> bool:
        """Whether the rows of a page from ``start`` to ``stop`` hold numbers only."""
        return bool(torch.isfinite(self.pages_GLC[page, start:stop]).all())

    def view(self, meta: BatchMeta) -> LatentPages:
        """Return the arena itself and the batch's part of the block table; nothing is copied."""
        index = self._tables.index(meta)
        return LatentPages(
            rows_GLC=self.pages_GLC,
            table_SB=index.table_SB,
            lengths_S=index.lengths_S,
            latent_size=self._latent_size,
        )

    def view_rows(self, meta: BatchMeta) -> LatentPages:
        """Return the arena itself and the pages and the context of every row."""
        index = self._tables.index(meta)
        if index.table_TB is None or index.seen_T is None:
            return self.view(meta).by_row(meta.ragged)
        return LatentPages(
            rows_GLC=self.pages_GLC,
            table_SB=index.table_TB,
            lengths_S=index.seen_T,
            latent_size=self._latent_size,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.pages_GLC.shape[-1] * self.pages_GLC.element_size()

    def read_rows(self, rows_T: Tensor) -> Tensor:
        """Copy rows of the flattened arena as ``rows_TY``, uint8."""
        return self.pages_GLC.flatten(0, 1).index_select(0, rows_T).view(torch.uint8)

    def write_rows(self, rows_T: Tensor, rows_TY: Tensor) -> None:
        """Overwrite rows of the flattened arena with what `read_rows` returned."""
        self.pages_GLC.flatten(0, 1).view(torch.uint8).index_copy_(0, rows_T, rows_TY)

    def copy_rows(self, source_page: int, target_page: int, num_rows: int) -> None:
        """Copy the first rows of one page to another."""
        self.pages_GLC[target_page, :num_rows].copy_(self.pages_GLC[source_page, :num_rows])
