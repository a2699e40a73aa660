"""``y = x W^T`` in native code, with weights read as they are stored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.linear.reference import Stored

__all__ = ["linear", "linear_many"]

_WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def linear(x: Tensor, weight_OI: Tensor, scale_O: Tensor | None = None) -> Tensor:
    """Arguments and result as in `reference.linear`; activations are float32.

    Raises:
        ShapeError: The operands do not fit each other, or a dtype is not served.
    """
    size_out, size_in = weight_OI.shape
    weight_type = _weight_type(x, weight_OI, scale_O)
    y = x.new_empty((*x.shape[:-1], size_out))
    _native_ops.call(
        "linear",
        *(x.contiguous(), weight_OI, scale_O, y, y.numel() // size_out, size_in, size_out),
        *(size_in, size_out, weight_type),
    )
    return y


def linear_many(x: Tensor, groups: Sequence[Sequence[Stored]]) -> list[Tensor]:
    """Arguments and result as in `reference.linear_many`: all matrices in one call, at most 16.

    Raises:
        ShapeError: The operands do not fit each other, or a dtype is not served.
    """
    size_in, words = x.shape[-1], array("q")
    results = []
    for group in groups:
        width = sum(stored.weight_OI.shape[0] for stored in group)
        y = x.new_empty((*x.shape[:-1], width))
        place = _native_ops.address(y)
        for weight_OI, scale_O in group:
            weight_type = _weight_type(x, weight_OI, scale_O)
            scale = 0 if scale_O is None else _native_ops.address(scale_O)
            size_out = weight_OI.shape[0]
            words.extend((_native_ops.address(weight_OI), scale, place))
            words.extend((size_out, width, weight_type))
            place += size_out * y.element_size()
        results.append(y)
    rows = x.numel() // size_in
    count = sum(len(group) for group in groups)
    _native_ops.call("linear_many", x.contiguous(), words, count, rows, size_in, size_in)
    return results


def _weight_type(x: Tensor, weight_OI: Tensor, scale_O: Tensor | None) -> int:
    """Check the operands and return the number of the weight's stored form."""
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
    return weight_type
