"""The tier in memory: checkpoints that can be handed out without reading a file."""

from __future__ import annotations

import threading

from moonlet.engine.cache.external.checkpoint import Checkpoint
from moonlet.engine.cache.external.geometry import CacheIdentity, Payload
from moonlet.engine.cache.external.ledger import Ledger

__all__ = ["HostTier"]


class HostTier:
    """Objects in memory, counted by the bytes of their payloads. Safe for threads.

    Args:
        identity: Sizes of units and states.
        budget_bytes: Most payload bytes that are kept.

    Attributes:
        num_evictions: Checkpoints that had to make room.
    """

    def __init__(self, identity: CacheIdentity, budget_bytes: int) -> None:
        self.num_evictions = 0
        self._state_bytes = identity.geometry.state_bytes
        self._ledger = Ledger(budget_bytes, identity.unit_bytes)
        self._units: dict[bytes, Payload] = {}
        self._checkpoints: dict[bytes, Checkpoint] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        """Whether the checkpoint is here."""
        with self._lock:
            return key in self._ledger

    def __len__(self) -> int:
        with self._lock:
            return len(self._ledger)

    @property
    def num_bytes(self) -> int:
        """Payload bytes kept."""
        with self._lock:
            return self._ledger.num_bytes

    @property
    def budget_bytes(self) -> int:
        """Most payload bytes that are kept."""
        return self._ledger.budget_bytes

    def touch(self, key: bytes) -> bool:
        """Note a use; returns whether the checkpoint is here."""
        with self._lock:
            self._ledger.touch(key)
            return key in self._ledger

    def fits(self, num_units: int) -> bool:
        """Whether a checkpoint of so many units can be kept at all."""
        return self._ledger.fits(num_units, self._state_bytes)

    def unit(self, key: bytes) -> Payload | None:
        """Rows of one unit, None where they are not here."""
        with self._lock:
            return self._units.get(key)

    def store(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint all of whose units are given; nothing happens where it is here.

        Of a unit that is here already, the payload here stays.
        """
        keys = checkpoint.keys
        with self._lock:
            if checkpoint.key in self._ledger or not self.fits(len(keys)):
                return
            freed = self._ledger.reserve(keys, self._state_bytes)
            self.num_evictions += len(freed.checkpoints)
            for key in freed.checkpoints:
                del self._checkpoints[key]
            for unit in freed.units:
                del self._units[unit]
            for unit in keys:
                self._units.setdefault(unit, checkpoint.units[unit])
            units = {unit: self._units[unit] for unit in keys}
            self._checkpoints[checkpoint.key] = Checkpoint(keys, units, checkpoint.state)
            self._ledger.publish(checkpoint.key)

    def load(self, key: bytes) -> Checkpoint | None:
        """Return a checkpoint, None where it is not here; counts as a use."""
        with self._lock:
            self._ledger.touch(key)
            return self._checkpoints.get(key)

    def check(self) -> None:
        """Assert that the payloads are those that the ledger counts."""
        with self._lock:
            self._ledger.check()
            assert set(self._checkpoints) == set(self._ledger), "checkpoints differ"
            assert set(self._units) == self._ledger.units, "units differ"
            kept = sum(unit.nbytes for unit in self._units.values())
            kept += sum(c.state.nbytes for c in self._checkpoints.values())
            assert kept == self._ledger.num_bytes, "bytes differ"
