"""Between the prefix index and the external pool: what leaves the arenas, and what comes back.

Ends of turns, ends of prompts and places where prompts part are written while the engine is idle,
and whatever is given up for room just before it goes. A request whose prefix reaches further in the
pool than in the arenas starts from there (hybrid-cache.md section 12). Bytes are copied by the
engine's thread, files are written by the pool's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonlet.engine.cache.checkpoints import Checkpoint
from moonlet.engine.cache.external import Checkpoint as ExternalCheckpoint
from moonlet.engine.cache.external import ExternalPool
from moonlet.engine.cache.prefix import PrefixCache
from moonlet.engine.cache.state import PagedState
from moonlet.engine.cache.transfer import SequenceMemory

__all__ = ["Writeback"]

_WRITTEN = frozenset({"turn", "tail", "junction"})


class Writeback:
    """Copies checkpoints to the pool and finds them there again.

    Args:
        pool: Where they go.
        cache: Index of the arenas.
        state: The arenas.
    """

    def __init__(self, pool: ExternalPool, cache: PrefixCache, state: PagedState) -> None:
        self.pool = pool
        self._cache, self._state = cache, state
        self._pending: dict[bytes, None] = {}
        self._loaded: ExternalCheckpoint | None = None

    @property
    def has_pending(self) -> bool:
        """Whether something waits to be copied."""
        return bool(self._pending)

    def note(self, checkpoint: Checkpoint) -> None:
        """Remember a checkpoint that is worth keeping beyond the arenas."""
        if checkpoint.kinds & _WRITTEN:
            self._pending[checkpoint.key] = None

    def write_next(self) -> None:
        """Copy what has waited longest."""
        key = next(iter(self._pending))
        checkpoint = self._cache.find(key)
        if checkpoint is None:
            del self._pending[key]
        else:
            self.write(checkpoint)

    def evicted(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint that is about to be given up, if it is worth it."""
        if checkpoint.kinds & _WRITTEN:
            self.write(checkpoint)

    def write(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint that is still whole."""
        self._pending.pop(checkpoint.key, None)
        pages, keys = self._cache.rows_of(checkpoint)
        memory = SequenceMemory(state=self._state, slot=checkpoint.states[0], pages=pages)
        self.pool.store(keys, memory.read_rows, memory.read_state)

    def find(self, keys: Sequence[bytes], num_units: int) -> ExternalCheckpoint | None:
        """Return the longest checkpoint of a chain beyond ``num_units`` units, read from the pool.

        The last one read is remembered: who waits for room asks in every step.
        """
        while (index := self.pool.longest(keys)) is not None and index + 1 > num_units:
            if self._loaded is None or self._loaded.key != keys[index]:
                self._loaded = self.pool.load(keys[index])
            if self._loaded is not None:
                return self._loaded
        return None

    def read(self, checkpoint: object, slot: int, pages: Sequence[int]) -> None:
        """Copy the rows and states of what `find` returned into the arenas."""
        assert isinstance(checkpoint, ExternalCheckpoint)
        memory = SequenceMemory(state=self._state, slot=slot, pages=pages)
        start = 0
        for rows in checkpoint.rows():
            memory.write_rows(start, rows)
            start += self._cache.unit_size
        memory.write_state(checkpoint.state)
        self._loaded = None

    def close(self) -> None:
        """Copy everything that waits and end the pool's thread."""
        while self._pending:
            self.write_next()
        self.pool.close()
