"""Memory: how fast this process can read it, how large the cache is, how much it holds."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from moonlet.kernels import probe

__all__ = [
    "ReadProbe",
    "cold_bytes",
    "last_level_cache_bytes",
    "memory_bytes",
    "read_bandwidth",
    "resident_bytes",
    "storage_bytes",
]

DEFAULT_COLD_BYTES = 256 << 20
SLICES = 4
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache_bytes(caches: Path = _CACHES) -> int:
    """Return the size of the largest cache that the system reports, 0 where it reports none."""
    sizes = [0]
    for file in caches.glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdecimal() and text[-1] in _UNITS:
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
    return max(sizes)


def cold_bytes() -> int:
    """Return how much must be read in turn so that no cache serves it.

    Twice the largest cache, at least 256 MiB, at most a sixteenth of the machine's memory.
    """
    wanted = max(DEFAULT_COLD_BYTES, 2 * last_level_cache_bytes())
    return min(wanted, memory_bytes() // 16)


class ReadProbe:
    """Reads a buffer larger than any cache, a quarter at a time.

    A slice comes back after the three others, so it is cold each time and a sample stays short.
    Uses as many threads as torch has been given, like the operators that it bounds.

    Args:
        num_bytes: Size of the buffer; `cold_bytes` when absent.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        size = (cold_bytes() if num_bytes is None else num_bytes) // 4
        self._slices = torch.ones(size).split(-(-size // SLICES))
        self._next = 0

    def sample(self) -> float:
        """Read the next slice; return bytes per second."""
        data = self._slices[self._next % len(self._slices)]
        self._next += 1
        read = probe.probe_read if probe.is_available() else torch.sum
        began = time.perf_counter()
        read(data)
        return data.nbytes / (time.perf_counter() - began)


def read_bandwidth(repeats: int = 3) -> float:
    """Return the best of some sequential reads of a buffer larger than any cache, in bytes/s.

    Args:
        repeats: Timed reads of the whole buffer after one untimed.
    """
    reader = ReadProbe()
    for _ in range(SLICES):
        reader.sample()
    return max(reader.sample() for _ in range(SLICES * repeats))


def resident_bytes() -> int:
    """Return the memory that this process holds now; its peak where the system says no more."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes behind some tensors, memory that they share counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def memory_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
