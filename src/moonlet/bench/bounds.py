"""The bounds of a measurement, taken in the same run as what they bound.

A `Bounds` is sampled between the measured runs, so that a busy neighbour or a changed clock slows
both alike; medians count, of bandwidths each the best of a few reads in a row, over the whole run
or over the samples since a `mark`. Work of `num_bytes` and `flops` cannot take less than

    max(num_bytes / read bandwidth, flops / multiply-add peak)
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from moonlet.bench.costs import Cost
from moonlet.bench.memory import SLICES, ReadProbe
from moonlet.kernels import _native, probe

__all__ = ["Bounds"]

# blocks of the multiply-add probe per thread: a few milliseconds
BLOCKS_PER_THREAD = 8
# side of the matrix product that stands in for the probe where there is no native library
MATRIX_SIZE = 512


class Bounds:
    """Read bandwidth and multiply-add peak of this process.

    Args:
        buffer_bytes: Size of the buffer that is read; larger than any cache when absent.
    """

    def __init__(self, buffer_bytes: int | None = None) -> None:
        self._reader = ReadProbe(buffer_bytes)
        self._matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE)
        self._bandwidths: list[float] = []
        self._peaks: list[float] = []
        self._load_before = os.getloadavg()[0]

    def sample(self) -> None:
        """Measure both once; call it before, between and after the measured runs."""
        # memory that rested is slow at first touch, which the weights in use never are
        self._bandwidths.append(max(self._reader.sample() for _ in range(SLICES)))
        began = time.perf_counter()
        flops = self._multiply_add()
        self._peaks.append(flops / (time.perf_counter() - began))

    def _multiply_add(self) -> int:
        if probe.is_available():
            return probe.probe_fma(BLOCKS_PER_THREAD * torch.get_num_threads())
        self._matrix @ self._matrix
        return 2 * MATRIX_SIZE**3

    @property
    def mark(self) -> int:
        """How many samples there are, to relate a measurement to those that follow."""
        return len(self._peaks)

    def bandwidth(self, since: int = 0) -> float:
        """Return the median read bandwidth, bytes/s."""
        return statistics.median(self._bandwidths[since:])

    def peak(self, since: int = 0) -> float:
        """Return the median multiply-add peak, floating point operations per second."""
        return statistics.median(self._peaks[since:])

    def relate(self, cost: Cost, seconds: float, since: int = 0) -> dict[str, Any]:
        """Return JSON values: work, rates, the bound, what it is by, and the fraction reached.

        Args:
            cost: Work done.
            seconds: Time it took.
            since: The `mark` taken before the measurement; its samples bound it.
        """
        by_memory = cost.num_bytes / self.bandwidth(since)
        by_compute = cost.flops / self.peak(since)
        bound = max(by_memory, by_compute)
        return {
            "bytes": cost.num_bytes,
            "flops": cost.flops,
            "bytes_per_s": cost.num_bytes / seconds,
            "flops_per_s": cost.flops / seconds,
            "bound_s": bound,
            "bound_by": "memory" if by_memory >= by_compute else "compute",
            "ratio": bound / seconds,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the medians, how they were measured, and the load average before and now."""
        return {
            "read_bandwidth_bytes_per_s": self.bandwidth(),
            "fma_flops_per_s": self.peak(),
            "probe": "native" if probe.is_available() else "torch",
            "probe_samples": self.mark,
            "isa_level": _native.isa_level(),
            "threads": torch.get_num_threads(),
            "load_average": [self._load_before, os.getloadavg()[0]],
        }
