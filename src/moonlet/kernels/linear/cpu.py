"""``y = x W^T`` in native code, with weights read as they are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops

__all__ = ["linear"]

_WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def linear(x: Tensor, weight_OI: Tensor, scale_O: Tensor | None = None) -> Tensor:
    """Arguments and result as in `reference.linear`; activations are float32.

    Raises:
        ShapeError: The operands do not fit each other, or a dtype is not served.
    """
    size_out, size_in = weight_OI.shape
    weight_type = _WEIGHT_TYPES.get(weight_OI.dtype)
    if weight_type is None or (weight_type == 2) != (scale_O is not None):
        raise ShapeError(
            f"weight has dtype {weight_OI.dtype} {'with' if scale_O is not None else 'without'} "
            "scales; use float32 or bfloat16, or int8 with scales"
        )
    if x.dtype != torch.float32 or x.shape[-1] != size_in:
        raise ShapeError(
            f"x is {x.dtype} {list(x.shape)}; float32 rows of {size_in} values are needed"
        )
    if scale_O is not None:
        _native_ops.require("scale", scale_O, torch.float32, size_out)
    y = x.new_empty((*x.shape[:-1], size_out))
    _native_ops.call(
        "linear",
        *(x.contiguous(), weight_OI, scale_O, y, y.numel() // size_out, size_in, size_out),
        *(size_in, size_out, weight_type),
    )
    return y
