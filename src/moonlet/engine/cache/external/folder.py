"""The directory of the disk tier: one file per object, complete or absent.

    pool.json            whose directory this is (`CacheIdentity.header`)
    LOCK                 locked by the process that has the pool open, which wrote its id inside
    units/KEY            MLA rows of one hash unit, raw
    states/KEY           KDA state of one checkpoint, raw
    manifests/KEY        JSON that makes a checkpoint readable (`cache.external.checkpoint`)

KEY is a chain hash in hex. A file is written under a temporary name, synced and renamed, so a
killed process leaves a temporary file or an object without manifest, never half an object.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from moonlet.core.errors import CheckpointError, ConfigError
from moonlet.engine.cache.external.geometry import CacheIdentity, Payload, first_difference, view

__all__ = ["PoolFolder"]

MANIFESTS, STATES, UNITS = "manifests", "states", "units"
_KINDS = (MANIFESTS, STATES, UNITS)
_MARKER, _LOCK = "pool.json", "LOCK"
TEMPORARY = ".tmp"


class PoolFolder:
    """An opened and locked pool directory.

    Two processes would evict objects under each other and each count only its own bytes, so the
    second one is refused. The lock belongs to the process and ends with it, however it ends.

    Args:
        path: Created where absent; else empty or a pool of the same identity.
        identity: Whose checkpoints are kept here.

    Raises:
        ConfigError: The directory is used by another process, belongs to another model or
            version, or is no pool. Nothing in it was changed.
    """

    def __init__(self, path: Path, identity: CacheIdentity) -> None:
        self.path = path
        self._identity = identity
        try:
            self._refuse_strangers()
            path.mkdir(parents=True, exist_ok=True)
            self._lock_file = self._locked()
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._claim()
            for kind in _KINDS:
                (path / kind).mkdir(exist_ok=True)
            self.sync(".")
        except OSError as error:
            self.close()
            raise self._unusable(error) from None
        except ConfigError:
            self.close()
            raise

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cache directory {self.path} cannot be used: {error.strerror}; name another"
        )

    def _refuse_strangers(self) -> None:
        if not self.path.exists() or (self.path / _MARKER).exists():
            return
        strangers = {entry.name for entry in self.path.iterdir()} - {_LOCK, _MARKER + TEMPORARY}
        if strangers:
            raise ConfigError(
                f"cache directory {self.path} holds {min(strangers)!r} and is no cache of moonlet; "
                "name an empty one"
            )

    def _locked(self) -> int:
        handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            raise ConfigError(
                f"cache directory {self.path} is in use by process {owner or 'unknown'}; "
                "stop it or name another directory"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        return handle

    def _claim(self) -> None:
        """Check the marker, or write it into a new directory."""
        marker, own = self.path / _MARKER, self._identity.header()
        if not marker.exists():
            write_durably(marker, json.dumps(own, indent=1).encode())
            return
        try:
            difference = first_difference(own, json.loads(marker.read_bytes()))
        except ValueError:
            difference = "pool.json is damaged"
        if difference is not None:
            raise ConfigError(
                f"cache directory {self.path} belongs to another model or version: {difference}; "
                "name another directory or delete it"
            )

    def close(self) -> None:
        """Let another process open the directory."""
        os.close(self._lock_file)

    def file(self, kind: str, key: bytes) -> Path:
        """Where an object lies."""
        return self.path / kind / key.hex()

    def write(self, kind: str, key: bytes, data: Payload | bytes) -> None:
        """Write one object; its bytes and, after `sync`, its name survive a crash.

        Raises:
            OSError: Nothing is left behind, unless removing failed as well.
        """
        write_durably(self.file(kind, key), data)

    def sync(self, *kinds: str) -> None:
        """Make the names of the objects written so far durable."""
        for kind in kinds:
            handle = os.open(self.path / kind, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def read(self, kind: str, key: bytes, num_bytes: int) -> Payload:
        """Read one object of a known size.

        Raises:
            CheckpointError: The file is shorter or longer.
            OSError: It is absent or cannot be read.
        """
        payload = np.empty(num_bytes, np.uint8)
        with self.file(kind, key).open("rb", buffering=0) as handle:
            target, num_read = payload.data, 0
            while num_read < num_bytes and (step := handle.readinto(target[num_read:])):
                num_read += step
            if num_read < num_bytes or handle.read(1):
                raise CheckpointError(f"{self.file(kind, key)} does not have {num_bytes} bytes")
        return payload

    def delete(self, kind: str, keys: Iterable[bytes]) -> None:
        """Delete objects; one that is absent already is as good."""
        for key in keys:
            self.file(kind, key).unlink(missing_ok=True)

    def names(self, kind: str) -> set[str]:
        """Names of all files of a kind, temporary ones included."""
        return set(os.listdir(self.path / kind))

    def num_bytes(self) -> int:
        """Bytes of all files of all kinds; those that vanish meanwhile count nothing."""
        total = 0
        for kind in _KINDS:
            for name in self.names(kind):
                try:
                    total += (self.path / kind / name).stat().st_size
                except FileNotFoundError:
                    continue
        return total


def write_durably(path: Path, data: Payload | bytes) -> None:
    """Write a file so that it is complete whenever its name exists."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb", buffering=0) as handle:
            rest = view(data)
            while rest:
                rest = rest[handle.write(rest) :]
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
