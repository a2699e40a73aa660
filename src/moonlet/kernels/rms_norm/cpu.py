"""RMSNorm and the gated RMSNorm for inference in native code, rows of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.kernels import _native_ops

__all__ = ["gated_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Arguments and result as in `reference.rms_norm`; ``x`` float32, any dtype of the weight.

    Raises:
        ShapeError: A shape differs or ``x`` is not float32.
    """
    size = weight_D.shape[0]
    _native_ops.require("x", x, torch.float32, *x.shape[:-1], size)
    out = torch.empty(x.shape, dtype=torch.float32)
    weight_D = weight_D.float().contiguous()
    rows, stride = out.numel() // size, size
    if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) > size:
        # columns of a wider matrix are read where they lie
        stride = x.stride(0)
    else:
        x = x.contiguous()
    _native_ops.call("rms_norm_f32", _native_ops.Rows(x), weight_D, out, rows, size, stride, eps)
    return out


def gated_rms_norm(x: Tensor, weight_D: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Arguments and result as in `reference.gated_rms_norm`; ``x`` and ``gate`` float32.

    Raises:
        ShapeError: A shape differs, or ``x`` or ``gate`` is not float32.
    """
    size = weight_D.shape[0]
    _native_ops.require("x", x, torch.float32, *x.shape[:-1], size)
    _native_ops.require("gate", gate, torch.float32, *x.shape)
    out = torch.empty(x.shape, dtype=torch.float32)
    weight_D = weight_D.float().contiguous()
    _native_ops.call(
        "gated_rms_norm_f32",
        *(x.contiguous(), weight_D, gate.contiguous(), out, out.numel() // size, size, eps),
    )
    return out
