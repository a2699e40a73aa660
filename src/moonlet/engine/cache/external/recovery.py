"""What of a pool directory can be used after a restart, however the last process ended.

Usable is a checkpoint whose manifest is intact and ours and whose objects have the right length;
contents are compared with their sha256 when they are read. Everything else in the directory is
deleted: the directory is ours (`folder.PoolFolder` refuses any other), and an object without
manifest can never be used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from moonlet.core.errors import CheckpointError
from moonlet.engine.cache.external.checkpoint import Manifest, parse_manifest
from moonlet.engine.cache.external.folder import (
    MANIFESTS,
    STATES,
    TEMPORARY,
    UNITS,
    PoolFolder,
)
from moonlet.engine.cache.external.geometry import CacheIdentity, first_difference

__all__ = ["Recovered", "delete_others", "recover"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover` found.

    Attributes:
        manifests: Usable ones with the bytes of their files, least recently used first.
        refused: Reason by file name, for manifests of another model or version.
        corrupt: Reason by file name, for manifests that are torn or lack an object.
    """

    manifests: list[tuple[Manifest, int]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)


def recover(folder: PoolFolder, identity: CacheIdentity) -> Recovered:
    """Read all manifests of a directory and say which checkpoints are usable; deletes nothing."""
    found, digests = Recovered(), {}
    sizes = {kind: _sizes(folder, kind) for kind in (MANIFESTS, STATES, UNITS)}
    header = identity.header()
    for path in _by_age(folder, sizes[MANIFESTS]):
        try:
            body = parse_manifest(path.read_bytes())
            foreign = first_difference(header, body)
            if foreign is not None:
                found.refused[path.name] = foreign
                continue
            manifest = Manifest.decode(body, header)
            _require_objects(path.name, manifest, header, sizes, digests)
        except (CheckpointError, OSError) as error:
            found.corrupt[path.name] = str(error)
            continue
        digests.update(zip(manifest.keys, manifest.unit_digests, strict=True))
        found.manifests.append((manifest, sizes[MANIFESTS][path.name]))
    for name, reason in (*found.refused.items(), *found.corrupt.items()):
        _log.warning("cached checkpoint %s in %s is dropped: %s", name[:16], folder.path, reason)
    return found


def _sizes(folder: PoolFolder, kind: str) -> dict[str, int]:
    return {name: (folder.path / kind / name).stat().st_size for name in folder.names(kind)}


def _by_age(folder: PoolFolder, names: dict[str, int]) -> list[Path]:
    paths = [folder.path / MANIFESTS / name for name in names if not name.endswith(TEMPORARY)]
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _require_objects(
    name: str,
    manifest: Manifest,
    header: dict[str, object],
    sizes: dict[str, dict[str, int]],
    digests: dict[bytes, str],
) -> None:
    """Raise CheckpointError unless the objects of a manifest can be there."""
    if manifest.key.hex() != name:
        raise CheckpointError("the manifest lies under the name of another")
    if sizes[STATES].get(name) != header["state_bytes"]:
        raise CheckpointError("its state is missing or torn")
    for key, unit_digest in zip(manifest.keys, manifest.unit_digests, strict=True):
        if sizes[UNITS].get(key.hex()) != header["unit_bytes"]:
            raise CheckpointError(f"unit {key.hex()[:16]} is missing or torn")
        if digests.get(key, unit_digest) != unit_digest:
            raise CheckpointError(f"unit {key.hex()[:16]} has another sha256 elsewhere")


def delete_others(folder: PoolFolder, kept: Iterable[Manifest]) -> None:
    """Delete every file of the directory that no kept manifest refers to."""
    manifests, units = set(), set()
    for manifest in kept:
        manifests.add(manifest.key.hex())
        units.update(key.hex() for key in manifest.keys)
    # manifests first: a kill in between leaves objects without manifest, not the reverse
    for kind, keep in ((MANIFESTS, manifests), (STATES, manifests), (UNITS, units)):
        for name in folder.names(kind) - keep:
            (folder.path / kind / name).unlink(missing_ok=True)
