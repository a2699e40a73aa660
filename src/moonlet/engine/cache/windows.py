"""Projected inputs of verification windows, kept beside an arena until it is known what stays.

Per row 4 H K + H numbers instead of a state of H K K numbers and its convolution tail: at K3's
sizes 197,000 bytes instead of 6,734,000 (speculative.md section 6.3). The buffers are as large as
the most window rows that one batch had, whatever the number of slots: rows belong to the batch that
is running, so a slot that changes hands has nothing left in them.

Letters as in `model.state`; E tentative rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels.ragged import Ragged
from moonlet.model.state import BatchMeta, BatchPart, KDAWindow

__all__ = ["EmittedStates", "KeptInputs", "KeptRows", "Rollback", "WindowRows"]

Rollback = Literal["replay", "snapshot"]
"""What the windows of a batch leave until they are settled: their projected inputs, from which the
rows that stay are run again, or the state after every row, of which one is picked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptRows:
    """How many rows of every window stay: computed once per commit, used by every layer.

    Attributes:
        slots_S: Slots of the windows, int64.
        counts_S: Rows that stay, int64.
        ragged: Borders of the windows.
    """

    slots_S: Tensor
    counts_S: Tensor
    ragged: Ragged

    @cached_property
    def last(self) -> tuple[Tensor, Tensor]:
        """Slots of the windows that keep something, and the last row that each keeps."""
        some = (self.counts_S > 0).nonzero()[:, 0]
        rows_S = self.ragged.starts_S + self.counts_S - 1
        return self.slots_S.index_select(0, some), rows_S.index_select(0, some)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptInputs:
    """Windows of the last batch as the projected inputs of their rows.

    Attributes:
        meta: That batch.
        rows: Copies in the arena's `WindowRows`.
        replay: The operator ``kda_replay`` of the layer.
    """

    meta: BatchMeta
    rows: KDAWindow
    replay: Callable[..., None]

    def commit(self, recurrent_GHKV: Tensor, conv_GCW: Tensor, kept: KeptRows) -> None:
        """Run the rows that stay, in place."""
        memory = (recurrent_GHKV, conv_GCW, kept.slots_S)
        self.replay(*self.rows, *memory, kept.ragged, kept.counts_S)


@dataclass(frozen=True, kw_only=True, eq=False)
class EmittedStates:
    """Windows of the last batch as the states after each of their rows.

    Attributes:
        meta: That batch.
        recurrent_EHKV: float32.
        conv_ECW: Carries.
    """

    meta: BatchMeta
    recurrent_EHKV: Tensor
    conv_ECW: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the states."""
        return self.recurrent_EHKV.nbytes + self.conv_ECW.nbytes

    def commit(self, recurrent_GHKV: Tensor, conv_GCW: Tensor, kept: KeptRows) -> None:
        """Move the states after the last row that stays into the slots."""
        slots, rows = kept.last
        recurrent_GHKV.index_copy_(0, slots, self.recurrent_EHKV.index_select(0, rows))
        conv_GCW.index_copy_(0, slots, self.conv_ECW.index_select(0, rows).to(conv_GCW.dtype))


class WindowRows:
    """Buffers for the rows of one layer's windows, which grow to the most rows of one batch."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def copy(self, meta: BatchMeta, rows: KDAWindow) -> KDAWindow:
        """Copy the tentative rows; the copies are valid until the next call.

        Raises:
            ShapeError: The batch has no window.
        """
        windows = meta.window_parts[0]
        if windows is None:
            raise ShapeError("the rows of a batch without windows are not kept")
        sources = (rows.raw_EC, rows.z_EHK, rows.beta_EH)
        count = windows.ragged.num_rows
        if not self._buffers or self._buffers[0].shape[0] < count:
            # memory of inference mode could not be written outside of it
            with torch.inference_mode(False):
                self._buffers = [x.new_empty((count, *x.shape[1:])) for x in sources]
        kept = [buffer[:count] for buffer in self._buffers]
        for target, source in zip(kept, sources, strict=True):
            _select(target, source.detach(), windows)
        raw_EC, z_EHK, beta_EH = kept
        return rows._replace(raw_EC=raw_EC, z_EHK=z_EHK, beta_EH=beta_EH)


def _select(target_E: Tensor, source_T: Tensor, part: BatchPart) -> None:
    if part.is_whole:
        target_E.copy_(source_T)
    else:
        torch.index_select(source_T, 0, part.rows, out=target_E)
