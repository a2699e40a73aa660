"""Checkpoint folders to break: raw safetensors files written without any checks."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from tests.golden_data import golden_dir, require

INDEX = "model.safetensors.index.json"
# tiny_k3: layer 0 is KDA and dense, layer 3 MLA with experts
FIRST = "model-00001-of-000011.safetensors"
SHARD = "model-00004-of-000011.safetensors"
LAYER = "language_model.model.layers.3."


def golden_checkpoint(name: str) -> Path:
    """A golden checkpoint folder; read only."""
    return require(golden_dir("model") / name / "checkpoint")


def copied(name: str, target: Path) -> Path:
    """A writable copy of a golden checkpoint."""
    for file in golden_checkpoint(name).iterdir():
        # content only: the originals may be read-only
        shutil.copyfile(file, target / file.name)
    return target


def read_raw(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and buffer of a shard."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(file: Path, header: dict[str, Any] | bytes, buffer: bytes) -> None:
    """Write a shard as told, valid or not."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + buffer)


def rename(folder: Path, shard: str, old: str, new: str, *, in_index: bool = True) -> None:
    """Rename a tensor in its shard and in the index."""
    header, buffer = read_raw(folder / shard)
    write_raw(
        folder / shard, {new if name == old else name: e for name, e in header.items()}, buffer
    )
    if in_index:
        edit_index(folder, {old: None, new: shard})


def edit_index(folder: Path, changes: dict[str, str | None]) -> None:
    """Set or delete names of the index."""
    index = json.loads((folder / INDEX).read_text())
    for name, shard in changes.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    (folder / INDEX).write_text(json.dumps(index))


def drop(folder: Path, shard: str, name: str) -> None:
    """Remove a tensor from its shard, closing the gap, and from the index."""
    header, buffer = read_raw(folder / shard)
    begin, end = header.pop(name)["data_offsets"]
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
    write_raw(folder / shard, header, buffer[:begin] + buffer[end:])
    edit_index(folder, {name: None})


def add(folder: Path, shard: str, name: str, dtype: str, shape: list[int], data: bytes) -> None:
    """Append a tensor to a shard and to the index."""
    header, buffer = read_raw(folder / shard)
    header[name] = {
        "dtype": dtype,
        "shape": shape,
        "data_offsets": [len(buffer), len(buffer) + len(data)],
    }
    write_raw(folder / shard, header, buffer + data)
    edit_index(folder, {name: shard})


def replace_tensor(
    folder: Path, shard: str, name: str, dtype: str, shape: list[int], data: bytes | None = None
) -> None:
    """Give a tensor another dtype, shape and content (zeros unless told)."""
    size = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}[dtype]
    drop(folder, shard, name)
    add(folder, shard, name, dtype, shape, data or bytes(size * math.prod(shape)))


def tensor_bytes(folder: Path, shard: str, name: str) -> bytes:
    """A tensor's bytes."""
    header, buffer = read_raw(folder / shard)
    begin, end = header[name]["data_offsets"]
    return buffer[begin:end]
