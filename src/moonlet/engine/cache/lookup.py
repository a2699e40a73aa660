"""What a lookup finds, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moonlet.engine.cache.checkpoints import Checkpoint

__all__ = ["NOTHING_FOUND", "Lookup", "PrefixCounts", "StoredPrefix"]


class StoredPrefix(Protocol):
    """A prefix outside the arenas that can be asked for."""

    @property
    def key(self) -> bytes:
        """Its name."""
        ...

    @property
    def num_tokens(self) -> int:
        """Its length."""
        ...


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is there of a prefix.

    Attributes:
        checkpoint: Where to resume; None where nothing can be resumed.
        pages: Pages with the rows below the checkpoint, in order of position.
        common: Endpoint up to which MLA rows are there, at or beyond the checkpoint.
        external: A longer prefix outside the arenas, in place of the checkpoint.
    """

    checkpoint: Checkpoint | None
    pages: tuple[int, ...]
    common: int
    external: StoredPrefix | None = None

    @property
    def position(self) -> int:
        """Tokens that need not be computed."""
        if self.external is not None:
            return self.external.num_tokens
        return 0 if self.checkpoint is None else self.checkpoint.position


NOTHING_FOUND = Lookup(None, (), 0)


@dataclass(slots=True)
class PrefixCounts:
    """Counters that only grow.

    Attributes:
        queries: Lookups of admitted requests.
        query_tokens: Tokens of those requests.
        hits: Admissions that resumed somewhere.
        hit_tokens: Tokens they did not compute.
        evicted_pages: Pages given up with rows in them.
        evicted_checkpoints: Checkpoints given up for room.
    """

    queries: int = 0
    query_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    evicted_checkpoints: int = 0
