"""The bytes of one sequence in the arenas, as `cache.external` takes and gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moonlet.engine.cache.external.geometry import Payload
from moonlet.engine.cache.state import PagedState

__all__ = ["SequenceMemory"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceMemory:
    """A slot and pages of a `PagedState`: the source of a store or an export, or their target.

    Attributes:
        state: The arenas.
        slot: Holds the KDA state.
        pages: Hold the MLA rows, in order of position.
    """

    state: PagedState
    slot: int
    pages: Sequence[int]

    def read_rows(self, start: int, stop: int) -> Payload:
        """Copy the rows of the positions ``start`` to ``stop``, flat."""
        return self.state.read_rows(self.pages, start, stop).flatten().cpu().numpy()

    def read_state(self) -> Payload:
        """Copy the KDA state, flat."""
        return self.state.read_slot(self.slot).flatten().cpu().numpy()

    def write_rows(self, start: int, rows: Payload) -> None:
        """Write the rows of the positions from ``start`` on."""
        self.state.write_rows(self.pages, start, torch.from_numpy(rows))

    def write_state(self, state: Payload) -> None:
        """Overwrite the KDA state."""
        self.state.write_slot(self.slot, torch.from_numpy(state))
