"""Between the prefix index and the external pool: what leaves the arenas, and what comes back.

Ends of turns, ends of prompts and places where prompts part are written while the engine is idle,
and whatever is given up for room just before it goes. A request whose prefix reaches further in the
pool than in the arenas starts from there (hybrid-cache.md section 12). Bytes are copied by the
engine's thread; files are written and read by two others, so no stream waits for a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonlet.engine.cache.checkpoints import Checkpoint
from moonlet.engine.cache.external import ExternalPool, Load, LoadQueue
from moonlet.engine.cache.prefix import PrefixCache
from moonlet.engine.cache.state import PagedState
from moonlet.engine.cache.transfer import SequenceMemory

__all__ = ["Writeback"]

_WRITTEN = frozenset({"turn", "tail", "junction"})


@dataclass(frozen=True, slots=True)
class Stored:
    """A prefix that the pool can be asked for.

    Attributes:
        key: Its name.
        num_tokens: Its position.
        num_bytes: Of its rows and states.
    """

    key: bytes
    num_tokens: int
    num_bytes: int


class Writeback:
    """Copies checkpoints to the pool and finds them there again.

    Args:
        pool: Where they go.
        cache: Index of the arenas.
        state: The arenas.
        max_load_bytes: Bound of the memory that is read into.

    Attributes:
        loads: What is being read.
        on_loaded: Called from another thread whenever a load has ended; set by the engine.
    """

    def __init__(
        self, pool: ExternalPool, cache: PrefixCache, state: PagedState, *, max_load_bytes: int
    ) -> None:
        self.pool = pool
        self.on_loaded: Callable[[], object] | None = None
        self.loads = LoadQueue(pool.load, max_load_bytes, self._wake)
        self._cache, self._state = cache, state
        self._pending: dict[bytes, None] = {}

    @property
    def has_pending(self) -> bool:
        """Whether something waits to be copied."""
        return bool(self._pending)

    def note(self, checkpoint: Checkpoint) -> None:
        """Remember a checkpoint that is worth keeping beyond the arenas."""
        if checkpoint.kinds & _WRITTEN:
            self._pending[checkpoint.key] = None

    def write_next(self) -> None:
        """Copy what has waited longest, if anything has."""
        key = next(iter(self._pending), None)
        checkpoint = None if key is None else self._cache.find(key)
        if checkpoint is not None:
            self.write(checkpoint)
        elif key is not None:
            del self._pending[key]

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

    # ---- coming back -----------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether a load has not ended or holds memory."""
        return len(self.loads) > 0

    def _wake(self) -> None:
        if self.on_loaded is not None:
            self.on_loaded()

    def find(self, keys: Sequence[bytes], num_units: int) -> Stored | None:
        """Name the longest checkpoint of a chain beyond ``num_units`` units; nothing is read."""
        index = self.pool.longest(keys)
        if index is None or index < num_units:
            return None
        identity = self.pool.identity
        num_bytes = (index + 1) * identity.unit_bytes + identity.geometry.state_bytes
        return Stored(keys[index], (index + 1) * identity.hash_unit, num_bytes)

    def can_start(self, stored: Stored) -> bool:
        """Whether there is memory to read it into."""
        return self.loads.has_room(stored.num_bytes)

    def start(self, stored: Stored) -> Load:
        """Begin to fetch what `find` named; what is in memory already is there at once."""
        known = self.pool.load_from_memory(stored.key)
        return self.loads.start(stored.key, stored.num_tokens, stored.num_bytes, known)

    def release(self, load: Load) -> None:
        """Forget a load that was copied or is not wanted any more."""
        self.loads.release(load)

    def close(self) -> None:
        """Give up what is being read, copy everything that waits and end the threads."""
        self.loads.close()
        while self._pending:
            self.write_next()
        self.pool.close()
