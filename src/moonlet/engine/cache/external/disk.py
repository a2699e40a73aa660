"""The tier on disk: checkpoints that survive a restart.

One thread calls `store` and is the only one that writes; any thread may look up and load. The lock
guards the bookkeeping and is never held while objects are read or written. A reader that finds an
object broken takes the checkpoints that need it out of the books at once; a writer notices before
it publishes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moonlet.core.errors import CheckpointError, ConfigError
from moonlet.engine.cache.external.checkpoint import Checkpoint, Manifest, digest
from moonlet.engine.cache.external.folder import MANIFESTS, STATES, UNITS, PoolFolder
from moonlet.engine.cache.external.geometry import CacheIdentity, Payload
from moonlet.engine.cache.external.ledger import Freed, Ledger
from moonlet.engine.cache.external.recovery import delete_others, recover

__all__ = ["DiskCounts", "DiskTier"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DiskCounts:
    """Counters of the disk tier since it was opened.

    Attributes:
        written_bytes: Bytes of objects and manifests written.
        read_bytes: Bytes of objects read.
        num_evictions: Checkpoints that had to make room.
        num_corrupt: Checkpoints dropped because a part was missing, torn or changed.
        num_lost_writes: Checkpoints not written: writing is off, it failed, or a unit that was
            relied on is gone.
    """

    written_bytes: int = 0
    read_bytes: int = 0
    num_evictions: int = 0
    num_corrupt: int = 0
    num_lost_writes: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """One checkpoint on its way to disk: its manifest, and the units that are not there yet."""

    manifest: Manifest
    encoded: bytes
    state: Payload
    new_units: dict[bytes, Payload] = field(default_factory=dict)


class DiskTier:
    """Objects in a directory, counted by the lengths of their files.

    Args:
        identity: Whose checkpoints are kept.
        path: The directory (`folder.PoolFolder`).
        budget_bytes: Most bytes of objects and manifests; checkpoints beyond it are evicted at
            once when a directory is reopened with less.

    Attributes:
        refused: Reason by name, for manifests of another model or version found at the start.

    Raises:
        ConfigError: The directory cannot be used; the message says why.
    """

    def __init__(self, identity: CacheIdentity, path: Path, budget_bytes: int) -> None:
        self._header = identity.header()
        self._unit_bytes = identity.unit_bytes
        self._state_bytes = identity.geometry.state_bytes
        self._ledger = Ledger(budget_bytes, self._unit_bytes)
        self._manifests: dict[bytes, Manifest] = {}
        self._digests: dict[bytes, str] = {}
        self._counts = DiskCounts()
        self._off_reason: str | None = None
        self._lock = threading.Lock()
        self._folder = PoolFolder(path, identity)
        try:
            found = recover(self._folder, identity)
            self.refused = found.refused
            self._counts.num_corrupt += len(found.corrupt)
            self._adopt(found.manifests)
            delete_others(self._folder, self._manifests.values())
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cache directory {path} cannot be read: {error.strerror}; name another"
            ) from None

    def _adopt(self, manifests: list[tuple[Manifest, int]]) -> None:
        """Take over what fits, the checkpoints used last before the others."""
        for manifest, manifest_bytes in reversed(manifests):
            own_bytes = self._state_bytes + manifest_bytes
            if self._ledger.has_room(manifest.keys, own_bytes):
                self._reserve(manifest, own_bytes)
                self._publish(manifest)
            else:
                self._counts.num_evictions += 1
        for manifest, _ in manifests:
            self._ledger.touch(manifest.key)

    def __contains__(self, key: bytes) -> bool:
        """Whether the checkpoint is here."""
        with self._lock:
            return key in self._ledger

    def __len__(self) -> int:
        with self._lock:
            return len(self._ledger)

    @property
    def num_bytes(self) -> int:
        """Bytes of objects and manifests, those being written included."""
        with self._lock:
            return self._ledger.num_bytes

    @property
    def budget_bytes(self) -> int:
        """Most bytes that are kept."""
        return self._ledger.budget_bytes

    @property
    def off_reason(self) -> str | None:
        """Why nothing is written any more; None while writing works."""
        return self._off_reason

    def counts(self) -> DiskCounts:
        """Return the counters (the object itself; read only)."""
        return self._counts

    def touch(self, key: bytes) -> bool:
        """Note a use, also for the next start; returns whether the checkpoint is here."""
        with self._lock:
            is_here = key in self._ledger
            if is_here:
                self._ledger.touch(key)
        if is_here:
            self._note_use(key)
        return is_here

    def has_unit(self, unit: bytes) -> bool:
        """Whether a unit is here or being written."""
        with self._lock:
            return self._ledger.has_unit(unit)

    def fits(self, num_units: int) -> bool:
        """Whether a checkpoint of so many units can be kept at all, its manifest aside."""
        return self._ledger.fits(num_units, self._state_bytes)

    # ---- writing: one thread --------------------------------------------------------------------

    def store(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, evicting others where needed; it is readable once it is durable.

        The first failing write, most likely of a full disk, turns writing off until the directory
        is opened again: one warning is logged and everything already here stays readable.
        """
        plan = self._plan(checkpoint)
        if plan is None:
            return
        manifest, own_bytes = plan.manifest, self._state_bytes + len(plan.encoded)
        with self._lock:
            if not self._ledger.fits(len(manifest.keys), own_bytes) or not self._still_holds(plan):
                self._counts.num_lost_writes += 1
                return
            freed = self._reserve(manifest, own_bytes)
            self._counts.num_evictions += len(freed.checkpoints)
        try:
            self._delete(freed)
            self._write(plan)
        except OSError as error:
            self._turn_off(error)
            self._withdraw(plan)
            return
        with self._lock:
            is_whole = self._publish(manifest)
        if is_whole:
            self._counts.written_bytes += len(plan.new_units) * self._unit_bytes + own_bytes
        else:
            self._withdraw(plan)

    def _plan(self, checkpoint: Checkpoint) -> _Plan | None:
        with self._lock:
            if checkpoint.key in self._ledger:
                return None
            known = {k: self._digests[k] for k in checkpoint.keys if k in self._digests}
        new_units = {k: unit for k, unit in checkpoint.units.items() if k not in known}
        if self._off_reason is not None or len(known) + len(new_units) < len(checkpoint.keys):
            self._counts.num_lost_writes += 1
            return None
        digests = known | {key: digest(unit) for key, unit in new_units.items()}
        manifest = Manifest(
            keys=checkpoint.keys,
            unit_digests=tuple(digests[key] for key in checkpoint.keys),
            state_digest=digest(checkpoint.state),
        )
        return _Plan(manifest, manifest.encode(self._header), checkpoint.state, new_units)

    def _still_holds(self, plan: _Plan) -> bool:
        """Whether the units that the plan relies on are here, in case a reader dropped one."""
        return all(key in plan.new_units or key in self._digests for key in plan.manifest.keys)

    def _reserve(self, manifest: Manifest, own_bytes: int) -> Freed:
        freed = self._ledger.reserve(manifest.keys, own_bytes)
        self._forget(freed)
        for key, unit_digest in zip(manifest.keys, manifest.unit_digests, strict=True):
            self._digests.setdefault(key, unit_digest)
        return freed

    def _publish(self, manifest: Manifest) -> bool:
        is_whole = self._ledger.publish(manifest.key)
        if is_whole:
            self._manifests[manifest.key] = manifest
        return is_whole

    def _forget(self, freed: Freed) -> None:
        for key in freed.checkpoints:
            self._manifests.pop(key, None)
        for unit in freed.units:
            del self._digests[unit]

    def _write(self, plan: _Plan) -> None:
        folder = self._folder
        for key, unit in plan.new_units.items():
            folder.write(UNITS, key, unit)
        folder.write(STATES, plan.manifest.key, plan.state)
        folder.sync(UNITS, STATES)
        folder.write(MANIFESTS, plan.manifest.key, plan.encoded)
        folder.sync(MANIFESTS)

    def _withdraw(self, plan: _Plan) -> None:
        """Take back a checkpoint that failed to be written or lost a unit meanwhile."""
        key = plan.manifest.key
        self._counts.num_lost_writes += 1
        with self._lock:
            self._forget(self._ledger.remove(key))
            orphans = [unit for unit in plan.new_units if not self._ledger.has_unit(unit)]
        try:
            self._delete(Freed([key], orphans))
        except OSError as error:
            _log.warning("cannot delete from the cache %s: %s", self._folder.path, error)

    def _delete(self, freed: Freed) -> None:
        self._folder.delete(MANIFESTS, freed.checkpoints)
        self._folder.delete(STATES, freed.checkpoints)
        self._folder.delete(UNITS, freed.units)

    def _turn_off(self, error: OSError) -> None:
        self._off_reason = error.strerror or str(error)
        _log.warning(
            "nothing more is written to the cache %s: %s; what is there stays in use",
            self._folder.path,
            self._off_reason,
        )

    # ---- reading: any thread --------------------------------------------------------------------

    def load(self, key: bytes, is_wanted: Callable[[], bool] = lambda: True) -> Checkpoint | None:
        """Read a checkpoint and compare every byte with its sha256; counts as a use.

        Args:
            key: Its name.
            is_wanted: Asked between two objects; reading ends where it says no.

        Returns:
            The checkpoint, or None: it is not wanted, not here, was evicted while being read, or
            is broken. After None for a wanted one it is not here any more, nor is any other with
            the same broken part.
        """
        with self._lock:
            manifest = self._manifests.get(key)
        if manifest is None:
            return None
        units: dict[bytes, Payload] = {}
        for unit, unit_digest in zip(manifest.keys, manifest.unit_digests, strict=True):
            if not is_wanted():
                return None
            payload = self._read(UNITS, unit, self._unit_bytes, unit_digest)
            if payload is None:
                self._drop(manifest, broken_unit=unit)
                return None
            units[unit] = payload
        state = self._read(STATES, key, self._state_bytes, manifest.state_digest)
        if state is None:
            self._drop(manifest, broken_unit=None)
            return None
        self.touch(key)
        return Checkpoint(manifest.keys, units, state)

    def _read(self, kind: str, key: bytes, num_bytes: int, wanted: str) -> Payload | None:
        try:
            payload = self._folder.read(kind, key, num_bytes)
        except (OSError, CheckpointError):
            return None
        with self._lock:
            self._counts.read_bytes += num_bytes
        return payload if digest(payload) == wanted else None

    def _drop(self, manifest: Manifest, broken_unit: bytes | None) -> None:
        """Forget and delete what cannot be used, unless it was evicted while being read."""
        with self._lock:
            if self._manifests.get(manifest.key) is not manifest:
                return
            if broken_unit is None:
                freed = self._ledger.remove(manifest.key)
            else:
                freed = self._ledger.remove_unit(broken_unit)
            self._forget(freed)
            self._counts.num_corrupt += len(freed.checkpoints)
            # under the lock: a writer must not store the same objects before they are gone
            try:
                self._delete(freed)
            except OSError as error:
                _log.warning("cannot delete from the cache %s: %s", self._folder.path, error)
        what = "state" if broken_unit is None else "unit"
        _log.warning(
            "a cached %s in %s is missing, torn or changed; %d checkpoints are dropped",
            what,
            self._folder.path,
            len(freed.checkpoints),
        )

    def _note_use(self, key: bytes) -> None:
        """Keep the order of uses for the next start."""
        try:
            os.utime(self._folder.file(MANIFESTS, key))
        except OSError:
            # evicted meanwhile, or a directory that cannot be written: the order is only a hint
            return

    def check(self, is_idle: Callable[[], bool]) -> None:
        """Assert that books and, while nothing is being written, files agree.

        Args:
            is_idle: Whether no `store` runs; asked while the lock keeps one from starting.
        """
        with self._lock:
            self._ledger.check()
            assert set(self._manifests) == set(self._ledger), "manifests differ"
            assert set(self._digests) == self._ledger.units, "units differ"
            assert self._folder.num_bytes() <= self.budget_bytes, "the disk budget is exceeded"
            if is_idle():
                keys = {key.hex() for key in self._ledger}
                assert self._folder.names(MANIFESTS) == keys, "manifest files differ"
                assert self._folder.names(STATES) == keys, "state files differ"
                units = {unit.hex() for unit in self._ledger.units}
                assert self._folder.names(UNITS) == units, "unit files differ"
                assert self._folder.num_bytes() == self._ledger.num_bytes, "file lengths differ"

    def close(self) -> None:
        """Let another process open the directory; nothing may be called afterwards."""
        self._folder.close()
