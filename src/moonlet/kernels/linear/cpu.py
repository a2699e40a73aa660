"""``y = x W^T`` in native code, with weights read as they are stored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.int8_panels import INPUTS, OUTPUTS, is_panels
from moonlet.kernels.linear.reference import Stored
from moonlet.kernels.mxfp4 import GROUP_SIZE

__all__ = ["linear", "linear_many"]

_MXFP4, _PANELS = 3, 4
_WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: _MXFP4}
# MXFP4 reads its inputs in an order of its own, in whole blocks
_BLOCK = 128
# and panels read theirs as codes with two numbers a group
_GROUP_WORDS = GROUP_SIZE // 4 + 2


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Arguments and result as in `reference.linear`; activations are float32.

    Raises:
        ShapeError: The operands do not fit each other, or a dtype is not served.
    """
    size_in, size_out = x.shape[-1], _size_out(weight, scale)
    weight_type = _weight_type(x, weight, scale)
    y = x.new_empty((*x.shape[:-1], size_out))
    rows = x.numel() // size_in
    inputs = _inputs(x, {weight_type})
    _native_ops.call(
        "linear",
        *(x.contiguous(), weight, scale, y, inputs, rows, size_in, size_out),
        *(size_in, size_out, weight_type),
    )
    return y


def linear_many(x: Tensor, groups: Sequence[Sequence[Stored]]) -> list[Tensor]:
    """Arguments and result as in `reference.linear_many`: all matrices in one call, at most 16.

    Raises:
        ShapeError: The operands do not fit each other, or a dtype is not served.
    """
    size_in, words = x.shape[-1], array("q")
    results, types = [], set()
    for group in groups:
        width = sum(_size_out(*stored) for stored in group)
        y = x.new_empty((*x.shape[:-1], width))
        place = _native_ops.address(y)
        for weight, scale in group:
            weight_type = _weight_type(x, weight, scale)
            types.add(weight_type)
            scales = 0 if scale is None else _native_ops.address(scale)
            size_out = _size_out(weight, scale)
            words.extend((_native_ops.address(weight), scales, place))
            words.extend((size_out, width, weight_type))
            place += size_out * y.element_size()
        results.append(y)
    rows = x.numel() // size_in
    count = sum(len(group) for group in groups)
    inputs = _inputs(x, types)
    _native_ops.call("linear_many", x.contiguous(), words, inputs, count, rows, size_in, size_in)
    return results


def _size_out(weight: Tensor, scale: Tensor | None) -> int:
    """Outputs of a matrix; a panel may hold more than there are."""
    return weight.shape[0] if scale is None else scale.shape[0]


def _inputs(x: Tensor, types: Set[int]) -> Tensor | None:
    """Room for the rows of ``x`` in the forms that MXFP4 and panels read."""
    words = 0
    if _MXFP4 in types:
        words += -(-x.shape[-1] // _BLOCK) * _BLOCK
    if _PANELS in types:
        words += -(-x.shape[-1] // GROUP_SIZE) * _GROUP_WORDS
    return x.new_empty(x.numel() // x.shape[-1] * words) if words else None


def _weight_type(x: Tensor, weight: Tensor, scale: Tensor | None) -> int:
    """Check the operands and return the number of the weight's stored form."""
    if is_panels(weight):
        return _panels_type(x, weight, scale)
    size_out, width = weight.shape
    weight_type = _WEIGHT_TYPES.get(weight.dtype)
    if weight_type is None or (weight_type >= 2) != (scale is not None):
        raise ShapeError(
            f"weight has dtype {weight.dtype} {'with' if scale is not None else 'without'} scales; "
            "use float32 or bfloat16, or int8 or packed MXFP4 (uint8) with scales"
        )
    size_in = 2 * width if weight_type == _MXFP4 else width
    if x.dtype != torch.float32 or x.shape[-1] != size_in:
        raise ShapeError(
            f"x is {x.dtype} {list(x.shape)}; float32 rows of {size_in} values are needed"
        )
    if scale is None:
        return weight_type
    if weight_type != _MXFP4:
        _native_ops.require("scale", scale, torch.float32, size_out)
        return weight_type
    if size_in % GROUP_SIZE:
        raise ShapeError(f"rows of {size_in} values are no whole groups of {GROUP_SIZE}")
    _native_ops.require("scale", scale, torch.uint8, size_out, size_in // GROUP_SIZE)
    return weight_type


def _panels_type(x: Tensor, weight: Tensor, scale: Tensor | None) -> int:
    """Check panels of int8 and return the number of their form."""
    if scale is None:
        raise ShapeError("int8 in panels comes without scales; give one float32 per output")
    panels, quads = -(-scale.shape[0] // OUTPUTS), weight.shape[1]
    _native_ops.require("weight", weight, torch.uint8, panels, quads, OUTPUTS, INPUTS)
    _native_ops.require("scale", scale, torch.float32, *scale.shape[:1])
    size_in = -(-x.shape[-1] // GROUP_SIZE) * GROUP_SIZE
    if x.dtype != torch.float32 or size_in != quads * INPUTS:
        raise ShapeError(
            f"x is {x.dtype} {list(x.shape)}; float32 rows of up to {quads * INPUTS} values are "
            "needed, in as many groups of 32"
        )
    return _PANELS
