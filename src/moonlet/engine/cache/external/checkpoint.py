"""A checkpoint in memory and the manifest that makes one readable on disk.

A manifest lists every object of its checkpoint with length and sha256. It is written last, so a
checkpoint without manifest does not exist, and it carries its own sha256 (hybrid-cache.md
section 12).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moonlet.core.errors import CheckpointError
from moonlet.engine.cache.external.geometry import Payload, view

__all__ = ["Checkpoint", "Manifest", "digest", "parse_manifest"]

KEY_BYTES = 32


def digest(payload: Payload | bytes) -> str:
    """Return the sha256 of an object, in hex."""
    return hashlib.sha256(view(payload)).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The bytes of one checkpoint.

    Attributes:
        keys: Chain hash of every hash unit in order; the last one names the checkpoint.
        units: MLA rows of the units by chain hash. On the way to a disk that holds a unit
            already, the unit may be absent.
        state: KDA state after the last unit.
    """

    keys: tuple[bytes, ...]
    units: Mapping[bytes, Payload]
    state: Payload

    @property
    def key(self) -> bytes:
        """Name of the checkpoint: chain hash of its last unit."""
        return self.keys[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes held in memory."""
        return sum(unit.nbytes for unit in self.units.values()) + self.state.nbytes

    def pieces(self, unit_size: int) -> Iterator[tuple[int, Payload]]:
        """Yield the rows of all units with the position of the first one."""
        for index, rows in enumerate(self.rows()):
            yield index * unit_size, rows

    def rows(self) -> list[Payload]:
        """Rows of all units, in order of position."""
        return [self.units[key] for key in self.keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one checkpoint on disk consists of.

    Attributes:
        keys: Chain hash of every hash unit in order.
        unit_digests: sha256 of every unit's rows, in hex.
        state_digest: sha256 of the state, in hex.
    """

    keys: tuple[bytes, ...]
    unit_digests: tuple[str, ...]
    state_digest: str

    @property
    def key(self) -> bytes:
        """Name of the checkpoint."""
        return self.keys[-1]

    def encode(self, header: Mapping[str, Any]) -> bytes:
        """Return the file: `CacheIdentity.header`, the objects, its own sha256."""
        units = [
            {"key": key.hex(), "bytes": header["unit_bytes"], "sha256": unit}
            for key, unit in zip(self.keys, self.unit_digests, strict=True)
        ]
        body = {
            **header,
            "position": len(self.keys) * header["hash_unit"],
            "units": units,
            "state": {"bytes": header["state_bytes"], "sha256": self.state_digest},
        }
        return json.dumps({"body": body, "sha256": digest(_canonical(body))}).encode()

    @staticmethod
    def decode(body: Mapping[str, Any], header: Mapping[str, Any]) -> Manifest:
        """Read the body of a manifest whose header was found to be ours.

        Raises:
            CheckpointError: Lengths, position or hashes do not fit together.
        """
        try:
            manifest = Manifest(
                keys=tuple(bytes.fromhex(unit["key"]) for unit in body["units"]),
                unit_digests=tuple(str(unit["sha256"]) for unit in body["units"]),
                state_digest=str(body["state"]["sha256"]),
            )
            sizes = {unit["bytes"] for unit in body["units"]}
            is_sound = (
                sizes == {header["unit_bytes"]}
                and body["state"]["bytes"] == header["state_bytes"]
                and body["position"] == len(manifest.keys) * header["hash_unit"]
                and all(len(key) == KEY_BYTES for key in manifest.keys)
                and len(set(manifest.keys)) == len(manifest.keys)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"a manifest lacks a part or has one too many: {error}") from None
        if not is_sound:
            raise CheckpointError("the parts of a manifest contradict each other")
        return manifest


def parse_manifest(data: bytes) -> dict[str, Any]:
    """Return the body of a manifest file after the check of its own sha256.

    Raises:
        CheckpointError: The file is torn, changed, or no manifest.
    """
    try:
        whole = json.loads(data)
        body, written = whole["body"], whole["sha256"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError("a manifest is torn or no manifest at all") from None
    if not isinstance(body, dict) or digest(_canonical(body)) != written:
        raise CheckpointError("a manifest does not have the sha256 that it was written with")
    return body


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
