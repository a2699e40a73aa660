"""Which files make up a checkpoint directory: the index and its shards, or one single file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonlet.core.errors import CheckpointError
from moonlet.weights.extents import TensorExtent, read_header

__all__ = ["INDEX_NAME", "SINGLE_NAME", "ShardSet", "find_shards"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """Files and tensors of a checkpoint directory.

    Attributes:
        names: Tensor name to shard file name, from the index (or from a single file's header).
        files: Shards that exist, sorted.
        missing_files: Shards that the index names and the directory lacks, sorted.
        extents: Tensors of the existing shards, by name.
        misplaced: Names for which the index and the shards disagree about the place.
        total_size: ``metadata.total_size`` of the index, or None.
    """

    names: Mapping[str, str]
    files: tuple[str, ...]
    missing_files: tuple[str, ...]
    extents: Mapping[str, TensorExtent]
    misplaced: tuple[str, ...] = ()
    total_size: int | None = None

    @property
    def weights(self) -> str:
        """``present``, ``partial`` or ``absent``."""
        if not self.files:
            return "absent"
        return "partial" if self.missing_files else "present"


def find_shards(directory: Path) -> ShardSet:
    """Read the index (plain or gzip) or the single weight file of a directory.

    Raises:
        CheckpointError: No index and not exactly one weight file, or a malformed index.
        CorruptShard: A shard's header is malformed; names the file.
    """
    for name in (INDEX_NAME, INDEX_NAME + ".gz"):
        if (directory / name).is_file():
            return _from_index(directory, directory / name)
    single = directory / SINGLE_NAME
    if not single.is_file():
        candidates = sorted(directory.glob("*.safetensors"))
        if not candidates:
            return ShardSet(names={}, files=(), missing_files=(), extents={})
        if len(candidates) > 1:
            raise CheckpointError(
                f"{directory} has {len(candidates)} weight files and no {INDEX_NAME}; "
                "fetch the index as well"
            )
        single = candidates[0]
    extents = read_header(single)
    names = dict.fromkeys(extents, single.name)
    return ShardSet(names=names, files=(single.name,), missing_files=(), extents=extents)


def _from_index(directory: Path, index: Path) -> ShardSet:
    names, total_size = _read_index(index)
    wanted = sorted(set(names.values()))
    present = {name for name in wanted if (directory / name).is_file()}
    extents: dict[str, TensorExtent] = {}
    misplaced: set[str] = set()
    for file in sorted(present):
        for name, extent in read_header(directory / file).items():
            if names.get(name) != file:
                misplaced.add(name)
            extents.setdefault(name, extent)
    misplaced.update(n for n, file in names.items() if file in present and n not in extents)
    return ShardSet(
        names=names,
        files=tuple(sorted(present)),
        missing_files=tuple(name for name in wanted if name not in present),
        extents=extents,
        misplaced=tuple(sorted(misplaced)),
        total_size=total_size,
    )


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    try:
        raw = index.read_bytes()
        content: Any = json.loads(gzip.decompress(raw) if index.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{index.name} is not a readable JSON index: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index.name} has no weight_map")
    for file in set(map(str, names.values())):
        # no path may lead out of the folder, whatever the platform's separator
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index.name} names the shard {file!r}; a file name inside the folder is needed"
            )
    metadata = content.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return names, total_size if isinstance(total_size, int) else None
