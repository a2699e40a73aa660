"""Waiting sequences: one queue per priority class, in order of arrival."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from moonlet.engine.request import Sequence

__all__ = ["WaitingQueues"]


class WaitingQueues:
    """Queues of all classes; a preempted sequence returns to its old place.

    Args:
        num_classes: How many there are.
    """

    def __init__(self, num_classes: int) -> None:
        self._queues: list[list[Sequence]] = [[] for _ in range(num_classes)]

    def __len__(self) -> int:
        """Sequences that wait."""
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, the most important class first."""
        return (sequence for queue in self._queues for sequence in queue)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its arrival belongs."""
        insort(self._queues[sequence.rank], sequence, key=lambda known: known.arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        self._queues[sequence.rank].remove(sequence)

    def of(self, rank: int) -> list[Sequence]:
        """The waiting sequences of a class, a copy."""
        return list(self._queues[rank])

    def heads(self) -> list[Sequence]:
        """The sequence of each class that has waited longest."""
        return [queue[0] for queue in self._queues if queue]
