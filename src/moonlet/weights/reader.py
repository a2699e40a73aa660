"""Reading tensors by name from sharded safetensors files, memory-mapped or with positioned reads.

Both modes return the same values. ``mmap`` maps a shard once and returns tensors over a private
mapping: pages are read when touched and may be dropped again by the system. ``pread`` reads each
tensor into memory of its own, which suits disks and network mounts where page faults are slow.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

import torch
from torch import Tensor

from moonlet.core.errors import ConfigError, CorruptShard, MissingTensor
from moonlet.weights.extents import DTYPE_BYTES, TensorExtent

__all__ = ["TORCH_DTYPES", "ReadMode", "ShardReader"]

ReadMode = Literal["mmap", "pread"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


class ShardReader:
    """Reads tensors by name; a context manager that closes its files.

    Args:
        extents: Tensors by name.
        mode: ``mmap`` or ``pread``.

    Raises:
        ConfigError: Another mode.
    """

    def __init__(self, extents: Mapping[str, TensorExtent], mode: str = "mmap") -> None:
        if mode not in get_args(ReadMode):
            raise ConfigError(
                f"read mode is {mode!r}; choose one of {', '.join(get_args(ReadMode))}"
            )
        self._extents = extents
        self._mode = mode
        self._descriptors: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors already returned stay valid."""
        # a mapping lives on in the tensors made from it and ends with the last of them
        self._maps.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, name: str) -> Tensor:
        """Return one tensor with its published shape and dtype.

        In ``mmap`` mode its memory is a private view of the file; writing to it copies the page
        and never reaches the disk.

        Raises:
            MissingTensor: No such tensor.
            CorruptShard: The file has become shorter since its header was read.
        """
        extent = self._extents.get(name)
        if extent is None:
            raise MissingTensor(f"no tensor {name} in this checkpoint")
        dtype = TORCH_DTYPES[extent.dtype]
        if not extent.length:
            return torch.empty(extent.shape, dtype=dtype)
        flat = self._mapped(extent) if self._mode == "mmap" else self._pread(extent)
        return flat.view(dtype).reshape(extent.shape)

    def release(self, file: Path) -> None:
        """Forget the mapping of a shard that will not be read again."""
        self._maps.pop(file, None)

    def _mapped(self, extent: TensorExtent) -> Tensor:
        mapping = self._maps.get(extent.file)
        if mapping is None:
            mapping = mmap.mmap(self._descriptor(extent.file), 0, access=mmap.ACCESS_COPY)
            self._maps[extent.file] = mapping
        if extent.offset + extent.length > len(mapping):
            raise _shrunk(extent)
        flat = torch.frombuffer(
            mapping, dtype=torch.uint8, count=extent.length, offset=extent.offset
        )
        # tensors follow one another without padding, so an odd byte count misaligns the next
        return flat.clone() if extent.offset % DTYPE_BYTES[extent.dtype] else flat

    def _pread(self, extent: TensorExtent) -> Tensor:
        flat = torch.empty(extent.length, dtype=torch.uint8)
        target = flat.numpy().data
        descriptor = self._descriptor(extent.file)
        done = 0
        while done < extent.length:
            count = os.preadv(descriptor, [target[done:]], extent.offset + done)
            if count == 0:
                raise _shrunk(extent)
            done += count
        return flat

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            try:
                self._descriptors[file] = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                raise CorruptShard(f"cannot read {file.name}: {error.strerror}") from error
        return self._descriptors[file]


def _shrunk(extent: TensorExtent) -> CorruptShard:
    return CorruptShard(
        f"{extent.file.name} ends before {extent.name}; it has changed since it was opened"
    )
