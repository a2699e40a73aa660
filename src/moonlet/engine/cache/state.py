"""The engine's `ModelState`: recurrent states by slot, MLA rows by page.

Which sequence owns which slot and page is decided by the scheduler's cache manager; `bind` and
`release` tell it here. Rows of a tentative window are written to the pages (rows beyond a
sequence's length are void, so nothing needs undoing) while the recurrent states wait until
`commit` (speculative.md section 6): by default the projected inputs of a window are kept and the
rows that stay are run again; ``rollback="snapshot"`` keeps the state after every row instead.

What leaves the arenas, for the external pool or another process, is bytes (Y) of all layers:
rows ``[T, layers * row_bytes]``, so that any range of tokens is one contiguous piece, and states
``[layers, H, head_bytes]``, layers in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError, ConfigError, ShapeError
from moonlet.engine.cache.arenas import BlockTables, KDAArena, MLAArena, StepIndex
from moonlet.engine.cache.blocks import NULL_BLOCK
from moonlet.engine.cache.windows import KeptRows, Rollback
from moonlet.model.state import BatchMeta, KDAState, MLACache

__all__ = ["PagedState", "page_bytes", "slot_bytes"]


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all Gated MLA layers."""
    return len(config.mla_layers) * page_size * config.mla.cache_size * dtype.itemsize


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one slot over all KDA layers: float32 states and the convolution tail."""
    kda = config.kda
    recurrent = kda.num_heads * kda.head_dim**2 * torch.float32.itemsize
    conv = 3 * kda.projection_size * (kda.short_conv_kernel_size - 1) * dtype.itemsize
    return len(config.kda_layers) * (recurrent + conv)


class PagedState:
    """Arenas of all layers behind the protocols of `model.state`.

    Args:
        config: Architecture.
        num_slots: Sequences that can hold state.
        num_pages: Pages of MLA rows.
        page_size: Rows per page.
        max_model_len: Longest sequence.
        dtype: Of convolution tails and MLA rows; recurrent states are float32.
        device: Where the arenas live.
        rollback: How windows are taken back: ``replay`` or, as the reference, ``snapshot``.

    Raises:
        ConfigError: ``rollback`` is neither.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rollback: Rollback = "replay",
    ) -> None:
        if rollback not in get_args(Rollback):
            choices = " or ".join(get_args(Rollback))
            raise ConfigError(f"rollback is {rollback!r}; choose {choices}")
        pages_per_seq = -(-max_model_len // page_size)
        self.num_slots = num_slots
        self.num_pages = num_pages
        self._slot_bytes = slot_bytes(config, dtype)
        self.num_bytes = num_slots * self._slot_bytes
        self.num_bytes += num_pages * page_bytes(config, page_size, dtype)
        self._tables = BlockTables(num_slots, pages_per_seq, page_size, device)
        self._kda = {
            layer: KDAArena(config.kda, num_slots, self._tables, dtype, device, rollback)
            for layer in config.kda_layers
        }
        self._mla = {
            layer: MLAArena(config.mla, num_pages, self._tables, dtype, device)
            for layer in config.mla_layers
        }

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self._tables.page_size

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest possible sequence."""
        return self._tables.table_GB.shape[1]

    def use(self, index: StepIndex) -> None:
        """Run the next forward passes of ``index.meta`` with this index, kept by the caller."""
        self._tables.use(index)

    def copy_tables(self, slots_S: Tensor, table_SB: Tensor) -> None:
        """Write the pages of some slots, `pages_per_seq` each, to ``table_SB``."""
        torch.index_select(self._tables.table_GB, 0, slots_S, out=table_SB)

    def bind(self, slot: int, pages: Sequence[int]) -> None:
        """Give a newly admitted sequence its slot and pages; what they held is void."""
        self._tables.bind(slot, pages)

    def release(self, slot: int) -> None:
        """Forget the pages of a slot whose sequence has ended."""
        self._tables.release(slot)

    @property
    def version(self) -> int:
        """Grows whenever the pages of a slot change."""
        return self._tables.version

    def is_slot_finite(self, slot: int) -> bool:
        """Whether a slot holds numbers only, in every layer."""
        return all(arena.is_finite(slot) for arena in self._kda.values())

    def are_rows_finite(self, pages: Sequence[int], start: int, stop: int) -> bool:
        """Whether rows ``start`` to ``stop`` of a sequence hold numbers only, in every layer."""
        size = self.page_size
        while start < stop:
            end = min(stop, (start // size + 1) * size)
            page, first = pages[start // size], start % size
            if not all(m.is_finite(page, first, first + end - start) for m in self._mla.values()):
                return False
            start = end
        return True

    def kda(self, layer: int) -> KDAState:
        """State of 0-based KDA ``layer``."""
        return self._kda[layer]

    def mla(self, layer: int) -> MLACache:
        """Cache of 0-based Gated MLA ``layer``."""
        return self._mla[layer]

    @torch.no_grad()
    def commit(self, meta: BatchMeta, num_rows: Sequence[int]) -> None:
        """Keep the first ``num_rows[s]`` rows of every tentative sequence of the last forward.

        Args:
            meta: The batch of that forward.
            num_rows: One count per sequence of the batch; ignored where it is not tentative.

        Raises:
            CapacityError: A count exceeds its window; nothing was changed.
            ShapeError: The windows of this very batch do not wait in every layer; nothing was
                changed.
        """
        chosen = [s for s, flag in enumerate(meta.tentative) if flag]
        for s in chosen:
            if not 0 <= num_rows[s] <= meta.seq_lens[s]:
                raise CapacityError(
                    f"cannot keep {num_rows[s]} rows of a window of {meta.seq_lens[s]}"
                )
        for arena in self._kda.values():
            arena.check_window(meta)
        windows = meta.window_parts[0]
        if windows is None:
            return
        device = meta.slots_S.device
        kept = KeptRows(
            slots_S=meta.slots_S.index_select(0, windows.seqs),
            counts_S=torch.tensor([num_rows[s] for s in chosen], dtype=torch.int64, device=device),
            ragged=windows.ragged,
        )
        self.commit_rows(meta, kept)

    def commit_rows(self, meta: BatchMeta, kept: KeptRows) -> None:
        """Keep ``kept.counts_S`` rows of the windows of the last forward, all in range.

        Raises:
            ShapeError: As `commit`.
        """
        for arena in self._kda.values():
            arena.commit(meta, kept)

    def discard(self) -> None:
        """Drop a window that will not be committed, after a failed step."""
        for arena in self._kda.values():
            arena.discard()

    @property
    def window_bytes(self) -> int:
        """Bytes that windows take over all layers, beside slots and pages."""
        return sum(arena.window_bytes for arena in self._kda.values())

    def pages_of(self, slot: int) -> list[int]:
        """Pages bound to a slot, in order of position."""
        return self._tables.pages_of(slot)

    def read_rows(self, pages: Sequence[int], start: int, stop: int) -> Tensor:
        """Copy the MLA rows of the positions ``start`` to ``stop`` of a sequence.

        Args:
            pages: Pages of the sequence in order of position; bound to a slot or not.
            start: First position.
            stop: Position after the last.

        Returns:
            ``rows_TY`` uint8: of each token, the rows of all MLA layers one after the other.

        Raises:
            ShapeError: The range is empty or leaves the pages, or a page does not exist.
        """
        rows_T = self._row_index(pages, start, stop)
        return torch.cat([arena.read_rows(rows_T) for arena in self._mla.values()], dim=1)

    def write_rows(self, pages: Sequence[int], start: int, rows: Tensor) -> None:
        """Write what `read_rows` returned to the positions from ``start`` on.

        Args:
            pages: Pages of the sequence in order of position; nobody else may refer to those that
                are written.
            start: First position.
            rows: uint8, ``[T, layers * row_bytes]`` or flat.

        Raises:
            ShapeError: As `read_rows`, or the bytes are not whole rows.
        """
        sizes = [arena.row_bytes for arena in self._mla.values()]
        if rows.dtype != torch.uint8 or rows.numel() % sum(sizes):
            raise ShapeError(
                f"{rows.numel()} values of {rows.dtype} are not rows of {sum(sizes)} uint8 each"
            )
        rows_TY = rows.reshape(-1, sum(sizes)).to(self._tables.table_GB.device)
        rows_T = self._row_index(pages, start, start + len(rows_TY))
        for arena, part_TY in zip(self._mla.values(), rows_TY.split(sizes, dim=1), strict=True):
            arena.write_rows(rows_T, part_TY)

    def _row_index(self, pages: Sequence[int], start: int, stop: int) -> Tensor:
        size = self.page_size
        if not 0 <= start < stop <= len(pages) * size:
            raise ShapeError(f"rows {start} to {stop} are not inside {len(pages)} pages of {size}")
        used = pages[start // size : -(-stop // size)]
        if not all(1 <= page <= self.num_pages for page in used):
            raise ShapeError(f"pages {list(used)} reach outside 1 to {self.num_pages}")
        device = self._tables.table_GB.device
        used_B = torch.tensor(used, dtype=torch.int64, device=device)
        positions_T = torch.arange(start % size, start % size + stop - start, device=device)
        return used_B[positions_T // size] * size + positions_T % size

    def read_slot(self, slot: int) -> Tensor:
        """Copy the KDA state of a slot as ``state_LHY`` uint8 (`KDAArena.read_slot` per layer)."""
        return torch.stack([arena.read_slot(slot) for arena in self._kda.values()])

    def write_slot(self, slot: int, state: Tensor) -> None:
        """Overwrite a slot with what `read_slot` returned.

        Args:
            slot: Nobody else may refer to it.
            state: uint8, ``[layers, H, head_bytes]`` or flat.

        Raises:
            ShapeError: The bytes are not one state; nothing was written.
        """
        num_heads = next(iter(self._kda.values())).recurrent_GHKV.shape[1]
        if state.dtype != torch.uint8 or state.numel() != self._slot_bytes:
            raise ShapeError(
                f"{state.numel()} values of {state.dtype} are not a state of {self._slot_bytes} "
                "uint8"
            )
        state_LHY = state.reshape(len(self._kda), num_heads, -1).to(self._tables.table_GB.device)
        for arena, state_HY in zip(self._kda.values(), state_LHY, strict=True):
            arena.write_slot(slot, state_HY)

    def copy_slot(self, source: int, target: int) -> None:
        """Overwrite one slot with another, in all KDA layers."""
        for arena in self._kda.values():
            arena.copy_slot(source, target)

    def copy_rows(self, source_page: int, target_page: int, num_rows: int) -> None:
        """Copy the first rows of one page to another, in all MLA layers."""
        for arena in self._mla.values():
            arena.copy_rows(source_page, target_page, num_rows)

    def check(self) -> None:
        """Assert that bound pages exist, the null page is zero and no window is open."""
        bound = [p for slot in range(1, self.num_slots + 1) for p in self.pages_of(slot)]
        assert all(1 <= page <= self.num_pages for page in bound), "a page is out of range"
        for mla in self._mla.values():
            assert not bool(mla.pages_GLC[NULL_BLOCK].any()), "the null page was written"
        for kda in self._kda.values():
            assert not kda.is_pending, "a tentative window is still open"
