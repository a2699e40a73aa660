"""Writing behind the engine's back: one thread, a bounded queue, the oldest dropped first."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from moonlet.engine.cache.external.checkpoint import Checkpoint

__all__ = ["WriteQueue"]

_log = logging.getLogger(__name__)


class WriteQueue:
    """Hands checkpoints to ``write`` on a thread of its own.

    What waits holds at most ``max_bytes``, one being written aside. A checkpoint that finds no room
    drops those that have waited longest: they are the least likely to be wanted, and a
    conversation's next checkpoint replaces its last. One that is larger than the bound by itself
    waits alone.

    Args:
        write: Called for one checkpoint at a time.
        max_bytes: Bound of what waits.

    Attributes:
        num_dropped: Checkpoints dropped before they were begun.
    """

    def __init__(self, write: Callable[[Checkpoint], None], max_bytes: int) -> None:
        self.num_dropped = 0
        self._write = write
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self._current: bytes | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="moonlet-cache-writer", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        """Whether a checkpoint waits or is being written."""
        with self._changed:
            return key in self._waiting or key == self._current

    def __len__(self) -> int:
        """Checkpoints that wait or are being written."""
        with self._changed:
            return len(self._waiting) + (self._current is not None)

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of the checkpoints that wait."""
        with self._changed:
            return self._bytes()

    def _bytes(self) -> int:
        return sum(checkpoint.num_bytes for checkpoint in self._waiting.values())

    def put(self, checkpoint: Checkpoint) -> None:
        """Let a checkpoint wait for its turn; never blocks on a file."""
        with self._changed:
            assert not self._is_closing, "a checkpoint is put into a closed queue"
            while self._waiting and self._bytes() + checkpoint.num_bytes > self._max_bytes:
                self._waiting.popitem(last=False)
                self.num_dropped += 1
            self._waiting[checkpoint.key] = checkpoint
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits or is being written; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(self._is_done, timeout_s)

    def _is_done(self) -> bool:
        return (not self._waiting and self._current is None) or not self._thread.is_alive()

    def close(self, *, drain: bool) -> None:
        """Write what waits, or drop and count it, and end the thread."""
        with self._changed:
            self._is_closing = True
            if not drain:
                self.num_dropped += len(self._waiting)
                self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (checkpoint := self._next()) is not None:
            try:
                self._write(checkpoint)
            finally:
                # also when it raises: nobody may wait for a thread that is gone
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _next(self) -> Checkpoint | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            self._current, checkpoint = self._waiting.popitem(last=False)
            return checkpoint
