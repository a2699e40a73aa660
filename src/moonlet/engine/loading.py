"""Sequences that wait for their prefix from outside the arenas: bookkeeping, no tensors.

They hold the states and pages that the prefix will be copied to, and a place of their priority
class, but do not run: other sequences are computed meanwhile (hybrid-cache.md section 11). At most
half of the places may be taken by them, so that a slow disk cannot keep out those who need none.
"""

from __future__ import annotations

from collections.abc import Iterator

from moonlet.engine.cache.lookup import Lookup
from moonlet.engine.cache.manager import CacheManager
from moonlet.engine.request import Sequence

__all__ = ["LoadingSequences"]


class LoadingSequences:
    """The sequences in state ``LOADING``, in the order in which they began.

    Args:
        manager: Starts and releases their loads.
        max_num_seqs: Places of the engine.
    """

    def __init__(self, manager: CacheManager, max_num_seqs: int) -> None:
        self._manager = manager
        self._limit = max(1, max_num_seqs // 2)
        self._sequences: dict[str, Sequence] = {}
        # what has arrived for this step is found in the arenas after it
        self._landing: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._sequences.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether a sequence waits here."""
        return sequence.request_id in self._sequences

    def must_wait(self, found: Lookup) -> bool:
        """Whether a sequence with that lookup is better admitted later.

        Because the same prefix is on its way for another one, after which it is found in the
        arenas, or because there is no room to read it into.
        """
        if found.external is None:
            return False
        coming = {s.load.key for s in self if s.load is not None}
        if found.external.key in coming | self._landing:
            return True
        return len(self) >= self._limit or not self._manager.can_load(found)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait whose load has begun."""
        self._sequences[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever has become of its load."""
        del self._sequences[sequence.request_id]

    def take_done(self) -> list[Sequence]:
        """Take out the sequences whose loads have ended, well or not; once per step."""
        done = [s for s in self if s.load is not None and s.load.is_done]
        for sequence in done:
            self.remove(sequence)
        loads = [s.load for s in done if s.load is not None]
        self._landing = {load.key for load in loads if load.checkpoint is not None}
        return done
