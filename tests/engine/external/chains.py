"""Chains of units whose bytes follow from their hashes, so any mix-up shows."""

import hashlib
from collections.abc import Sequence

import numpy as np

from moonlet.engine.cache.external import (
    CacheIdentity,
    Checkpoint,
    ExternalPool,
    Payload,
    StateGeometry,
)

UNIT = 4
GEOMETRY = StateGeometry(
    dtype="bfloat16",
    num_mla_layers=2,
    row_width=3,
    num_kda_layers=3,
    num_heads=2,
    head_dim=2,
    conv_rows=3,
)
IDENTITY = CacheIdentity(fingerprint="model-a", hash_unit=UNIT, geometry=GEOMETRY)
UNIT_BYTES = IDENTITY.unit_bytes
STATE_BYTES = GEOMETRY.state_bytes


def chain(text: str, salt: str = "") -> tuple[bytes, ...]:
    """Chained sha256 of units that are one letter each."""
    key, keys = hashlib.sha256(salt.encode()).digest(), []
    for letter in text:
        key = hashlib.sha256(key + letter.encode()).digest()
        keys.append(key)
    return tuple(keys)


def content(key: bytes, what: str, num_bytes: int) -> Payload:
    """The only bytes that an object of this key may ever have."""
    data = hashlib.shake_256(key + what.encode()).digest(num_bytes)
    return np.frombuffer(data, np.uint8).copy()


class Source:
    """The arenas' side of a store: gives out rows and states, and notes which."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.units_read: list[int] = []
        self.num_states_read = 0

    def read_rows(self, start: int, stop: int) -> Payload:
        assert start % UNIT == 0
        assert stop == start + UNIT
        self.units_read.append(start // UNIT)
        return content(self.keys[start // UNIT], "rows", UNIT_BYTES)

    def read_state(self) -> Payload:
        self.num_states_read += 1
        return content(self.keys[-1], "state", STATE_BYTES)


def store(pool: ExternalPool, keys: Sequence[bytes]) -> Source:
    source = Source(keys)
    pool.store(keys, source.read_rows, source.read_state)
    return source


def assert_intact(checkpoint: Checkpoint | None, keys: Sequence[bytes]) -> None:
    assert checkpoint is not None
    assert checkpoint.keys == tuple(keys)
    for key, rows in zip(keys, checkpoint.rows(), strict=True):
        np.testing.assert_array_equal(rows, content(key, "rows", UNIT_BYTES))
    np.testing.assert_array_equal(checkpoint.state, content(keys[-1], "state", STATE_BYTES))
