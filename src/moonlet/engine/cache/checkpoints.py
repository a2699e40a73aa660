"""What a checkpoint is, which ones are worth more, and which ones a long path keeps.

A checkpoint says: the recurrent states of all KDA groups after exactly ``position`` tokens of one
prefix are kept here. It exists in every group or not at all, is never written again, and is the
only thing that a later request can resume from (hybrid-cache.md sections 5, 7 and 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Checkpoint", "CheckpointKind", "is_kept", "page_ends", "score"]

CheckpointKind = Literal["rolling", "page", "tail", "turn", "junction"]

# how many lookups later than its last use a kind is given up, compared with a rolling one
_WEIGHTS: dict[CheckpointKind, int] = {
    "rolling": 0,
    "page": 8,
    "tail": 64,
    "turn": 128,
    "junction": 256,
}
_HIT_WEIGHT = 16
_MAX_COUNTED_HITS = 16
# checkpoints of kind page per doubling of the distance from the end of a path
_PER_DOUBLING = 4


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Recurrent states at one position of one prefix.

    Attributes:
        position: Tokens that the states have consumed.
        chain: Hashes of the page ends up to the position, then its own where it lies inside a page;
            the MLA rows below the position are found by them.
        states: One block per KDA group.
        kinds: Why it is kept; it goes when none is left.
        last_used: Tick of the last hit or of its creation.
        hits: How often a request resumed here.
        pins: Readers that have not copied it yet.
    """

    position: int
    chain: tuple[bytes, ...]
    states: tuple[int, ...]
    kinds: set[CheckpointKind] = field(default_factory=set)
    last_used: int = 0
    hits: int = 0
    pins: int = 0

    @property
    def key(self) -> bytes:
        """Hash of the whole prefix."""
        return self.chain[-1]


def score(checkpoint: Checkpoint) -> int:
    """Return what decides the order of eviction; the smallest goes first."""
    weight = max(_WEIGHTS[kind] for kind in checkpoint.kinds)
    return checkpoint.last_used + weight + _HIT_WEIGHT * min(checkpoint.hits, _MAX_COUNTED_HITS)


def is_kept(position: int, end: int, page_size: int) -> bool:
    """Say whether a path that has reached ``end`` still keeps its page checkpoint.

    Page numbers divisible by higher powers of two survive longer, which leaves between two and four
    checkpoints per doubling of the distance and never needs a look at the others.
    """
    number = position // page_size
    power = number & -number
    return end // page_size - number < _PER_DOUBLING * power


def page_ends(keys: Sequence[bytes], position: int, page_size: int, unit_size: int) -> list[bytes]:
    """Return the ``chain`` of a checkpoint at ``position``.

    Args:
        keys: Hashes of the units of the prefix.
        position: Multiple of ``unit_size``.
        page_size: Multiple of ``unit_size``.
        unit_size: Tokens per unit.
    """
    per_page = page_size // unit_size
    units = position // unit_size
    chain = list(keys[per_page - 1 : units : per_page])
    if units % per_page:
        chain.append(keys[units - 1])
    return chain
