"""The external pool: checkpoints beyond the arenas, in host memory over disk.

Only a complete checkpoint can be found: rows and state of one position together, all units and all
groups (hybrid-cache.md sections 12 and 15, I3 and I12). Keys are chain hashes, which contain model,
tenant salt and media, so who has another salt can neither find nor name an entry (section 4).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonlet.core.errors import ConfigError, ShapeError
from moonlet.engine.cache.external.checkpoint import KEY_BYTES, Checkpoint
from moonlet.engine.cache.external.disk import DiskTier
from moonlet.engine.cache.external.geometry import CacheIdentity, Payload
from moonlet.engine.cache.external.host import HostTier
from moonlet.engine.cache.external.write_queue import WriteQueue

__all__ = ["ExternalPool", "PoolStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counters since the pool was opened, and what it holds now.

    Attributes:
        num_stores: Checkpoints taken by `ExternalPool.store`.
        num_host_hits: Loads answered from memory.
        num_disk_hits: Loads answered from disk.
        num_misses: Loads not answered.
        host_bytes: Payload bytes in memory, those waiting to be written aside.
        host_budget_bytes: Most of them.
        num_host_checkpoints: Checkpoints in memory.
        num_host_evictions: Checkpoints that left memory for others.
        disk_bytes: Bytes of files, those being written included.
        disk_budget_bytes: Most of them.
        num_disk_checkpoints: Checkpoints on disk.
        num_disk_evictions: Checkpoints that left the disk for others.
        written_bytes: Bytes written to disk.
        read_bytes: Bytes read from disk.
        num_pending_writes: Checkpoints that wait or are being written.
        num_dropped_writes: Checkpoints dropped from a full queue.
        num_lost_writes: Checkpoints not written although it was their turn.
        num_corrupt: Checkpoints on disk dropped as torn, changed or incomplete.
        num_refused: Manifests of another model or version found at the start.
        is_writing: Whether the disk still takes new checkpoints.
    """

    num_stores: int
    num_host_hits: int
    num_disk_hits: int
    num_misses: int
    host_bytes: int
    host_budget_bytes: int
    num_host_checkpoints: int
    num_host_evictions: int
    disk_bytes: int = 0
    disk_budget_bytes: int = 0
    num_disk_checkpoints: int = 0
    num_disk_evictions: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    num_pending_writes: int = 0
    num_dropped_writes: int = 0
    num_lost_writes: int = 0
    num_corrupt: int = 0
    num_refused: int = 0
    is_writing: bool = False


class ExternalPool:
    """Two tiers of checkpoints under one name. Safe for threads.

    A stored checkpoint goes to memory at once and to disk on a background thread. A checkpoint read
    from disk goes to memory as well.

    Args:
        identity: Whose checkpoints these are.
        host_bytes: Budget of the tier in memory; 0 for none.
        directory: Of the tier on disk; None for none.
        disk_bytes: Budget of the tier on disk.
        max_pending_bytes: Bound of what waits to be written (`write_queue.WriteQueue`).

    Raises:
        ConfigError: Neither tier is there, a budget is negative, or the directory cannot be used.
    """

    def __init__(
        self,
        identity: CacheIdentity,
        *,
        host_bytes: int,
        directory: Path | str | None = None,
        disk_bytes: int = 0,
        max_pending_bytes: int = 256 << 20,
    ) -> None:
        if directory is None and not host_bytes:
            raise ConfigError("an external cache needs host_bytes above 0 or a directory")
        self.identity = identity
        self._host = HostTier(identity, host_bytes)
        self._disk: DiskTier | None = None
        self._queue: WriteQueue | None = None
        if directory is not None:
            self._disk = DiskTier(identity, Path(directory), disk_bytes)
            self._queue = WriteQueue(self._disk.store, max_pending_bytes)
        self._num_stores = self._num_host_hits = self._num_disk_hits = self._num_misses = 0
        self._count_lock = threading.Lock()

    @property
    def refused(self) -> Mapping[str, str]:
        """Reason by name of each manifest on disk that belongs to another model or version."""
        return {} if self._disk is None else self._disk.refused

    def longest(self, hashes: Sequence[bytes]) -> int | None:
        """Find the longest checkpoint of a chain.

        Args:
            hashes: Chain hash of every complete unit of the prompt, in order.

        Returns:
            The largest index i for which the checkpoint after ``i + 1`` units is here, or None. It
            may be evicted before it is loaded.
        """
        for index in range(len(hashes) - 1, -1, -1):
            if self._has(hashes[index]):
                return index
        return None

    def _has(self, key: bytes) -> bool:
        return key in self._host or (self._disk is not None and key in self._disk)

    def load(self, key: bytes, is_wanted: Callable[[], bool] = lambda: True) -> Checkpoint | None:
        """Fetch a checkpoint by the chain hash of its last unit.

        Args:
            key: Its name.
            is_wanted: Asked while files are read; reading ends where it says no.

        Returns:
            All rows and the state, verified, or None. After None for a wanted one `longest` does
            not name this checkpoint again, unless it is stored anew, so asking it again ends.
        """
        checkpoint = self.load_from_memory(key)
        if checkpoint is not None:
            return checkpoint
        if self._disk is not None:
            checkpoint = self._disk.load(key, is_wanted)
            if checkpoint is not None:
                self._host.store(checkpoint)
        with self._count_lock:
            self._num_misses += checkpoint is None
            self._num_disk_hits += checkpoint is not None
        return checkpoint

    def load_from_memory(self, key: bytes) -> Checkpoint | None:
        """Fetch a checkpoint without reading a file; None where memory does not have it."""
        checkpoint = self._host.load(key)
        if checkpoint is None:
            return None
        if self._disk is not None:
            self._disk.touch(key)
        with self._count_lock:
            self._num_host_hits += 1
        return checkpoint

    def store(
        self,
        hashes: Sequence[bytes],
        read_rows: Callable[[int, int], Payload],
        read_state: Callable[[], Payload],
    ) -> bool:
        """Take a checkpoint whose source does not change during the call.

        Args:
            hashes: Chain hashes of all units up to the checkpoint's position.
            read_rows: Copies the MLA rows of positions start to stop, flat; called only for units
                that no tier holds. What it returns is kept, so it must be fresh memory.
            read_state: Copies the KDA state after the last unit, flat; fresh memory too.

        Returns:
            Whether anything was taken: False where every tier has it or none can.

        Raises:
            ShapeError: A hash or a copy has another size than the identity says.
        """
        if not hashes or any(len(key) != KEY_BYTES for key in hashes):
            raise ShapeError(f"{len(hashes)} chain hashes; at least one, of {KEY_BYTES} bytes each")
        keys = tuple(hashes)
        to_host = not self._host.touch(keys[-1]) and self._host.fits(len(keys))
        to_disk = self._wants_write(keys)
        if not to_host and not to_disk:
            return False
        units = self._collect(keys, read_rows, is_complete=to_host)
        state = _sized(read_state(), self.identity.geometry.state_bytes, "state")
        checkpoint = Checkpoint(keys, units, state)
        if to_host:
            self._host.store(checkpoint)
        if to_disk and self._queue is not None:
            self._queue.put(checkpoint)
        with self._count_lock:
            self._num_stores += 1
        return True

    def _wants_write(self, keys: tuple[bytes, ...]) -> bool:
        if self._disk is None or self._queue is None or self._disk.off_reason is not None:
            return False
        is_there = keys[-1] in self._queue or self._disk.touch(keys[-1])
        return not is_there and self._disk.fits(len(keys))

    def _collect(
        self, keys: tuple[bytes, ...], read_rows: Callable[[int, int], Payload], is_complete: bool
    ) -> dict[bytes, Payload]:
        """Gather units; without ``is_complete``, those on disk already are left out."""
        length, units = self.identity.hash_unit, {}
        for index, key in enumerate(keys):
            unit = self._host.unit(key)
            if unit is None:
                if not is_complete and self._disk is not None and self._disk.has_unit(key):
                    continue
                rows = read_rows(index * length, (index + 1) * length)
                unit = _sized(rows, self.identity.unit_bytes, "unit")
            units[key] = unit
        return units

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything stored so far is on disk or lost; False on a timeout."""
        return self._queue is None or self._queue.flush(timeout_s)

    def stats(self) -> PoolStats:
        """Return counters and fill levels."""
        with self._count_lock:
            counts = {
                "num_stores": self._num_stores,
                "num_host_hits": self._num_host_hits,
                "num_disk_hits": self._num_disk_hits,
                "num_misses": self._num_misses,
            }
        host = {
            "host_bytes": self._host.num_bytes,
            "host_budget_bytes": self._host.budget_bytes,
            "num_host_checkpoints": len(self._host),
            "num_host_evictions": self._host.num_evictions,
        }
        if self._disk is None or self._queue is None:
            return PoolStats(**counts, **host)
        disk = self._disk.counts()
        return PoolStats(
            **counts,
            **host,
            disk_bytes=self._disk.num_bytes,
            disk_budget_bytes=self._disk.budget_bytes,
            num_disk_checkpoints=len(self._disk),
            num_disk_evictions=disk.num_evictions,
            written_bytes=disk.written_bytes,
            read_bytes=disk.read_bytes,
            num_pending_writes=len(self._queue),
            num_dropped_writes=self._queue.num_dropped,
            num_lost_writes=disk.num_lost_writes,
            num_corrupt=disk.num_corrupt,
            num_refused=len(self._disk.refused),
            is_writing=self._disk.off_reason is None,
        )

    def check(self) -> None:
        """Assert that books, payloads, files and budgets of both tiers agree."""
        self._host.check()
        if self._disk is not None and self._queue is not None:
            queue = self._queue
            self._disk.check(is_idle=lambda: not len(queue))

    def close(self, *, drain: bool = True) -> None:
        """Write what waits (or drop it), end the thread and unlock the directory.

        Afterwards the pool is its tier in memory alone.
        """
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close(drain=drain)
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()


def _sized(payload: Payload, num_bytes: int, what: str) -> Payload:
    flat = payload.reshape(-1)
    if flat.dtype.itemsize != 1 or flat.nbytes != num_bytes:
        raise ShapeError(f"a {what} of {flat.nbytes} bytes was given; it has {num_bytes}")
    return flat
