"""Extents: where each tensor's bytes lie (file, offset, length, dtype, shape).

Reads safetensors headers only: 8 bytes little-endian header length, a JSON object of
``{name: {dtype, shape, data_offsets}}``, then one gapless buffer. A file that breaks this layout
is refused by name before any tensor is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from moonlet.core.errors import CorruptShard

__all__ = ["DTYPE_BYTES", "TensorExtent", "read_header"]

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}

_LENGTH_BYTES = 8
# the limit of the safetensors library
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """One tensor's bytes.

    Attributes:
        name: Published tensor name.
        file: Shard.
        offset: First byte, counted from the start of the file.
        length: Bytes.
        dtype: safetensors dtype name.
        shape: Row-major shape.
    """

    name: str
    file: Path
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, TensorExtent]:
    """Return the extents of one shard, by tensor name, in file order.

    Raises:
        CorruptShard: The file is unreadable, truncated or longer than its header says, the
            header is malformed, or tensors overlap, leave holes or disagree with their size.
    """
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as handle:
            header_bytes = int.from_bytes(handle.read(_LENGTH_BYTES), "little")
            if file_bytes < _LENGTH_BYTES + header_bytes or file_bytes < _LENGTH_BYTES:
                raise CorruptShard(
                    f"{file.name} is truncated: {file_bytes} bytes, its header alone needs "
                    f"{_LENGTH_BYTES + header_bytes}; fetch the shard again"
                )
            if header_bytes > _MAX_HEADER_BYTES:
                raise CorruptShard(f"{file.name} has a header of {header_bytes} bytes; not a shard")
            raw = handle.read(header_bytes)
    except OSError as error:
        raise CorruptShard(f"cannot read {file.name}: {error.strerror}") from error
    start = _LENGTH_BYTES + header_bytes
    extents = [
        _extent(file, start, name, entry)
        for name, entry in _parse(file, raw).items()
        if name != "__metadata__"
    ]
    extents.sort(key=lambda extent: (extent.offset, extent.length))
    _check_layout(file, start, file_bytes, extents)
    return {extent.name: extent for extent in extents}


def _parse(file: Path, raw: bytes) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = sorted({name for name in entries if names.count(name) > 1})
            raise CorruptShard(f"{file.name} repeats the key {repeated[0]!r} in its header")
        return entries

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except ValueError as error:
        raise CorruptShard(f"{file.name} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CorruptShard(f"{file.name} has a header that is not an object")
    return header


def _extent(file: Path, start: int, name: str, entry: Any) -> TensorExtent:
    if not isinstance(entry, dict):
        raise CorruptShard(f"{file.name}: the header entry of {name} is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CorruptShard(f"{file.name}: {name} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        raise CorruptShard(f"{file.name}: {name} has the malformed shape {shape!r}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptShard(f"{file.name}: {name} has the malformed data_offsets {offsets!r}")
    begin, end = offsets
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise CorruptShard(
            f"{file.name}: {name} spans {end - begin} bytes, {dtype} {list(shape)} needs {needed}"
        )
    return TensorExtent(name, file, start + begin, needed, dtype, tuple(shape))


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in value
    )


def _check_layout(file: Path, start: int, file_bytes: int, extents: list[TensorExtent]) -> None:
    end, previous = start, "the header"
    for extent in extents:
        if extent.offset < end:
            raise CorruptShard(f"{file.name}: {extent.name} overlaps {previous}")
        if extent.offset > end:
            raise CorruptShard(
                f"{file.name}: {extent.offset - end} unused bytes between {previous} "
                f"and {extent.name}"
            )
        end, previous = extent.offset + extent.length, extent.name
    if file_bytes < end:
        raise CorruptShard(
            f"{file.name} is truncated: {file_bytes} bytes of {end}; fetch the shard again"
        )
    if file_bytes > end:
        raise CorruptShard(
            f"{file.name} has {file_bytes - end} bytes after its last tensor; fetch it again"
        )
