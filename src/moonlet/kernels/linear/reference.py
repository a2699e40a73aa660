"""``y = x W^T`` with weights as they are stored (model.md section 3; K3 has no biases).

A weight may be coarser than the activations: bfloat16 as published, int8 with one float32 scale
per output row, or packed MXFP4 (model.md section 2.6). It is widened to the activations' dtype,
exactly, before the product. Int8 in panels (`kernels.int8_panels`) is multiplied with activations
that are rounded to int8 groups.

Letters: I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.kernels import int8_panels, mxfp4

__all__ = ["Stored", "linear", "linear_many"]


class Stored(NamedTuple):
    """A weight as it is stored, with its scales where it has them."""

    weight: Tensor
    scale: Tensor | None = None


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix.

    Args:
        x: Floating point ``[..., I]``.
        weight: ``[O, I]`` in the dtype of ``x``, bfloat16, or int8; or uint8 ``[O, I/2]``, the
            codes of MXFP4; or uint8 ``[O/16, I/4, 16, 4]``, int8 in panels.
        scale: float32 ``[O]``, the value of one int8 step of every row; uint8 ``[O, I/32]`` of
            MXFP4; None for other weights.

    Returns:
        ``[..., O]`` in the dtype of ``x``.
    """
    if int8_panels.is_panels(weight):
        assert scale is not None, "int8 weights come with scales"
        return int8_panels.multiply(x, weight, scale)
    if weight.dtype == torch.uint8:
        assert scale is not None, "MXFP4 weights come with scales"
        return F.linear(x, mxfp4.dequantize(weight, scale, x.dtype, "reference"))
    if weight.dtype == torch.int8:
        assert scale is not None, "int8 weights come with scales"
        return F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)
    return F.linear(x, weight.to(x.dtype))


def linear_many(x: Tensor, groups: Sequence[Sequence[Stored]]) -> list[Tensor]:
    """Multiply rows by several matrices.

    Args:
        x: Floating point ``[..., I]``.
        groups: Matrices whose outputs stand side by side in one result.

    Returns:
        One ``[..., sum of O]`` per group, contiguous, in the dtype of ``x``.
    """
    results = [[linear(x, *stored) for stored in group] for group in groups]
    return [parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1) for parts in results]
