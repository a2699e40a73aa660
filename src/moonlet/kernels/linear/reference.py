"""``y = x W^T`` with weights as they are stored (model.md section 3; K3 has no biases).

A weight may be coarser than the activations: bfloat16 as published, or int8 with one float32 scale
per output row. It is widened to the activations' dtype, exactly, before the product.

Letters: I input width, O output width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear"]


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
