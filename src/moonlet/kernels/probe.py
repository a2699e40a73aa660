"""Probes of the hardware's bounds: the fastest that native code here can read and multiply-add.

They do the work and say how much it was; whoever times them does the division. They run at the
instruction-set level in use, on torch's number of threads, like the operators that they bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.kernels import _native, _native_ops

__all__ = ["is_available", "probe_fma", "probe_read"]

# values that a thread reads before it takes the next piece: 1 MiB
READ_PIECE = 1 << 18
# the multiply-adds of one block, a multiple of 12: about half a millisecond with AVX-512
FMA_BLOCK = 12 << 17
FLOPS_PER_FMA = 32


def is_available() -> bool:
    """Whether the native library can be called."""
    return _native.availability()[0]


def probe_read(data: Tensor) -> float:
    """Read a buffer once and return the sum of its values.

    Args:
        data: float32, contiguous, on the CPU.

    Raises:
        ShapeError: ``data`` has another dtype or layout.
        BackendUnavailable: The library is not available.
    """
    _native_ops.require("data", data, torch.float32, *data.shape)
    sums = torch.empty(-(-data.numel() // READ_PIECE))
    _native_ops.call("probe_read", data, sums, data.numel(), READ_PIECE)
    return float(sums.sum())


def probe_fma(num_blocks: int) -> int:
    """Do multiply-adds in independent chains of registers.

    Args:
        num_blocks: Parts that threads take one after the other.

    Returns:
        Floating point operations done, two for a multiply-add.

    Raises:
        BackendUnavailable: The library is not available.
    """
    out = torch.empty(num_blocks)
    _native_ops.call("probe_fma", out, num_blocks, FMA_BLOCK)
    return num_blocks * FMA_BLOCK * FLOPS_PER_FMA
