"""What every method of drafting offers to a round of speculation.

Drafts are guesses of the ids that follow a sequence. They are one-hot: a method gives ids and no
distribution, so the rule of verification needs the target's distribution only (speculative.md
section 5.2). Wrong drafts cost time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from moonlet.engine.request import Sequence

__all__ = ["Drafter", "unseen"]


class Drafter(Protocol):
    """Proposes the next ids of sequences; used by the engine thread only."""

    def observe(self, sequence: Sequence) -> bool:
        """Take over ids of the sequence that were not seen yet, a bounded number per call.

        Returns:
            Whether all of them have been seen, so that `propose` may be called.
        """
        ...

    def propose(self, sequence: Sequence, limit: int) -> SequenceOf[int]:
        """Return at most ``limit`` ids that may follow the observed sequence; changes nothing."""
        ...

    def forget(self, sequence: Sequence, *, has_ended_well: bool) -> None:
        """Drop what is kept of a sequence that has ended; unknown ones are ignored.

        Args:
            sequence: It still holds its ids.
            has_ended_well: Whether its output may serve later requests.
        """
        ...

    def tracked(self) -> set[str]:
        """Ids of the requests that something is kept of."""
        ...


def unseen(sequence: Sequence, num_seen: int, limit: int) -> SequenceOf[int]:
    """Return the next ids of a sequence after those already seen, ``limit`` at most.

    A long prompt is taken over in several steps, so that no step waits for all of it.
    """
    return sequence.token_range(num_seen, min(sequence.num_tokens, num_seen + limit))
