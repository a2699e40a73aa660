"""The engine's `ModelState`: recurrent states by slot, MLA rows by page.

Which sequence owns which slot and page is decided by the scheduler's pools; `bind` and `release`
tell it here. Rows of a tentative window are written to the pages (rows beyond a sequence's length
are void, so nothing needs undoing) while the recurrent states wait until `commit`
(speculative.md section 6).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError
from moonlet.engine.cache.arenas import BlockTables, KDAArena, MLAArena, StepIndex
from moonlet.engine.cache.pages import NULL_PAGE
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
    ) -> None:
        pages_per_seq = -(-max_model_len // page_size)
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.num_bytes = num_slots * slot_bytes(config, dtype)
        self.num_bytes += num_pages * page_bytes(config, page_size, dtype)
        self._tables = BlockTables(num_slots, pages_per_seq, page_size, device)
        self._kda = {
            layer: KDAArena(config.kda, num_slots, self._tables, dtype, device)
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

    def kda(self, layer: int) -> KDAState:
        """State of 0-based KDA ``layer``."""
        return self._kda[layer]

    def mla(self, layer: int) -> MLACache:
        """Cache of 0-based Gated MLA ``layer``."""
        return self._mla[layer]

    def commit(self, meta: BatchMeta, num_rows: Sequence[int]) -> None:
        """Keep the first ``num_rows[s]`` rows of every tentative sequence of the last forward.

        Args:
            meta: The batch of that forward.
            num_rows: One count per sequence of the batch; ignored where it is not tentative.

        Raises:
            CapacityError: A count exceeds its window; nothing was changed.
        """
        slots, rows, first = [], [], 0
        slot_list = meta.slots_S.tolist()
        for s, length in enumerate(meta.seq_lens):
            if not meta.tentative[s]:
                continue
            if not 0 <= num_rows[s] <= length:
                raise CapacityError(f"cannot keep {num_rows[s]} rows of a window of {length}")
            if num_rows[s]:
                slots.append(slot_list[s])
                rows.append(first + num_rows[s] - 1)
            first += length
        device = meta.slots_S.device
        slots_t = torch.tensor(slots, dtype=torch.int64, device=device)
        rows_t = torch.tensor(rows, dtype=torch.int64, device=device)
        for arena in self._kda.values():
            arena.commit(slots_t, rows_t)

    def discard(self) -> None:
        """Drop a window that will not be committed, after a failed step."""
        for arena in self._kda.values():
            arena.discard()

    def pages_of(self, slot: int) -> list[int]:
        """Pages bound to a slot, in order of position."""
        return self._tables.pages_of(slot)

    def check(self) -> None:
        """Assert that no page has two owners, the null page is zero and no window is open."""
        bound = [p for slot in range(1, self.num_slots + 1) for p in self.pages_of(slot)]
        assert len(set(bound)) == len(bound), "a page is bound to two slots"
        assert all(1 <= page <= self.num_pages for page in bound), "a page is out of range"
        for mla in self._mla.values():
            assert not bool(mla.pages_GLC[NULL_PAGE].any()), "the null page was written"
        for kda in self._kda.values():
            assert not kda.is_pending, "a tentative window is still open"
