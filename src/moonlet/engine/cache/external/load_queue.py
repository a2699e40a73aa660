"""Reading behind the engine's back: one thread, a bounded amount of memory, one load at a time.

A load is read and compared with its checksums into memory of its own, never into an arena, so it
may be given up at any moment: what was reserved for it is free at once, its own bytes as soon as
the thread lets go of them (hybrid-cache.md sections 11 and 12).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from moonlet.engine.cache.external.checkpoint import Checkpoint

__all__ = ["Load", "LoadCounts", "LoadQueue"]

_log = logging.getLogger(__name__)

Read = Callable[[bytes, Callable[[], bool]], Checkpoint | None]


class Load:
    """One checkpoint on its way into memory.

    Attributes:
        key: Its name.
        num_tokens: Its position.
        num_bytes: Memory that it takes.
        is_done: Whether `checkpoint` says how it ended.
        checkpoint: What was read; None before the end and where reading failed.
        is_wanted: False once nobody waits for it.
    """

    __slots__ = (
        "checkpoint",
        "is_done",
        "is_wanted",
        "key",
        "num_bytes",
        "num_tokens",
        "started_at",
    )

    def __init__(self, key: bytes, num_tokens: int, num_bytes: int) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.is_done = False
        self.is_wanted = True
        self.checkpoint: Checkpoint | None = None
        self.started_at = time.monotonic()


@dataclass(slots=True)
class LoadCounts:
    """Counters that only grow.

    Attributes:
        started: Loads begun, those answered from memory included.
        failed: Loads of a checkpoint that was torn or had vanished.
        cancelled: Loads given up before they were done.
        loaded_bytes: Bytes of those that ended well.
        wait_s: Seconds that requests waited for them.
        read_s: Seconds that the thread spent reading and checking them.
    """

    started: int = 0
    failed: int = 0
    cancelled: int = 0
    loaded_bytes: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0


class LoadQueue:
    """Reads checkpoints with ``read`` on a thread of its own, in the order of `start`.

    Loads that wait, are read, or are done but not released hold at most ``max_bytes`` together; a
    load that is larger by itself is read alone.

    Args:
        read: Given a name and a question that it asks between two objects: whether the load is
            still wanted. None where there is no such checkpoint any more.
        max_bytes: Bound of the memory.
        on_done: Called by the thread whenever a load is done or its memory is free.
    """

    def __init__(self, read: Read, max_bytes: int, on_done: Callable[[], None]) -> None:
        self.counts = LoadCounts()
        self._read = read
        self._max_bytes = max_bytes
        self._on_done = on_done
        self._waiting: deque[Load] = deque()
        self._held: set[Load] = set()
        self._current: Load | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="moonlet-cache-reader", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Loads that hold memory."""
        with self._changed:
            return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Memory of all loads."""
        with self._changed:
            return self._held_bytes()

    def _held_bytes(self) -> int:
        return sum(load.num_bytes for load in self._held)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a load of that size may start now."""
        with self._changed:
            return not self._held or self._held_bytes() + num_bytes <= self._max_bytes

    def start(
        self, key: bytes, num_tokens: int, num_bytes: int, known: Checkpoint | None = None
    ) -> Load:
        """Begin a load; with ``known``, which is in memory already, it is done at once."""
        load = Load(key, num_tokens, num_bytes)
        with self._changed:
            assert not self._is_closing, "a load is started in a closed queue"
            self.counts.started += 1
            if known is not None:
                load.checkpoint, load.is_done = known, True
                self.counts.loaded_bytes += known.num_bytes
            else:
                self._held.add(load)
                self._waiting.append(load)
                self._changed.notify()
        return load

    def release(self, load: Load) -> None:
        """Say that nobody needs a load any more: it was copied, or is given up."""
        with self._changed:
            if not load.is_wanted:
                return
            load.is_wanted = False
            load.checkpoint = None
            self.counts.cancelled += not load.is_done
            if load is not self._current:
                self._held.discard(load)
            if load in self._waiting:
                self._waiting.remove(load)

    def close(self) -> None:
        """Give up everything and end the thread."""
        with self._changed:
            self._is_closing = True
            held = list(self._held)
        for load in held:
            self.release(load)
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (load := self._next()) is not None:
            started = time.monotonic()
            checkpoint = None
            try:
                checkpoint = self._read(load.key, lambda load=load: load.is_wanted)
            except Exception:
                # who waits computes the prefix; the next load may go well
                _log.exception("a cached checkpoint could not be read")
            self._settle(load, checkpoint, time.monotonic() - started)
            self._on_done()

    def _settle(self, load: Load, checkpoint: Checkpoint | None, read_s: float) -> None:
        with self._changed:
            self._current = None
            load.is_done = True
            if not load.is_wanted:
                self._held.discard(load)
                return
            load.checkpoint = checkpoint
            if checkpoint is None:
                self.counts.failed += 1
            else:
                self.counts.loaded_bytes += checkpoint.num_bytes
                self.counts.wait_s += time.monotonic() - load.started_at
                self.counts.read_s += read_s

    def _next(self) -> Load | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            self._current = self._waiting.popleft()
            return self._current
