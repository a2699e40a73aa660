"""The memory bound: how fast this process can read memory."""

from __future__ import annotations

import time

import torch

__all__ = ["read_bandwidth"]

BUFFER_BYTES = 256 << 20


def read_bandwidth(repeats: int = 3) -> float:
    """Return the best of some sequential reads of a buffer larger than any cache, in bytes/s.

    Uses as many threads as torch has been given, like the operators that it bounds.

    Args:
        repeats: Timed reads after one untimed.
    """
    buffer = torch.ones(BUFFER_BYTES // 4)
    buffer.sum()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - began)
    return BUFFER_BYTES / best
