"""Native SiTU-GLU and SwiGLU for inference: float32, threads over pieces of rows.

Gate and up may be column ranges of one wider matrix, such as the two halves of a fused projection:
rows are read with their stride, nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops

__all__ = ["situ_glu", "swiglu"]


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Arguments and result as in `reference.situ_glu`; float32 on the CPU only.

    Raises:
        ShapeError: Another dtype or device, or gate and up differ in shape.
    """
    return _run("situ_glu", gate, up, beta, 0.0 if linear_beta is None else linear_beta)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Arguments and result as in `reference.swiglu`; float32 on the CPU only.

    Raises:
        ShapeError: Another dtype or device, or gate and up differ in shape.
    """
    return _run("swiglu", gate, up)


def _run(name: str, gate: Tensor, up: Tensor, *betas: float) -> Tensor:
    for label, tensor in (("gate", gate), ("up", up)):
        if not (tensor.is_cpu and tensor.dtype == torch.float32 and tensor.shape == gate.shape):
            raise ShapeError(
                f"{label} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; the native "
                f"kernel reads float32 {list(gate.shape)} on the CPU"
            )
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    count = out.numel()
    rows, strides = 1, (count, count)
    if not (gate.is_contiguous() and up.is_contiguous()):
        if _has_plain_rows(gate) and _has_plain_rows(up):
            rows, strides = len(gate), (gate.stride(0), up.stride(0))
        else:
            gate, up = gate.contiguous(), up.contiguous()
    if count:
        sizes = (rows, count // rows, *strides)
        _native_ops.call(name, gate.data_ptr(), up.data_ptr(), out, *sizes, *betas)
    return out


def _has_plain_rows(x: Tensor) -> bool:
    return x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
