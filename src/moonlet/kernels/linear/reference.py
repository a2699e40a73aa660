"""``y = x W^T`` with weights as they are stored (model.md section 3; K3 has no biases).

A weight may be coarser than the activations: bfloat16 as published, or int8 with one float32 scale
per output row. It is widened to the activations' dtype, exactly, before the product.

Letters: I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Stored", "linear", "linear_many"]


class Stored(NamedTuple):
    """A weight as it is stored, with its scales where it has them."""

    weight_OI: Tensor
    scale_O: Tensor | None = None


def linear(x: Tensor, weight_OI: Tensor, scale_O: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix.

    Args:
        x: Floating point ``[..., I]``.
        weight_OI: The dtype of ``x``, bfloat16, or int8.
        scale_O: float32, the value of one int8 step of every row; None for other weights.

    Returns:
        ``[..., O]`` in the dtype of ``x``.
    """
    if weight_OI.dtype == torch.int8:
        assert scale_O is not None, "int8 weights come with scales"
        return F.linear(x, weight_OI.to(x.dtype)) * scale_O.to(x.dtype)
    return F.linear(x, weight_OI.to(x.dtype))


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
