"""RMSNorm and the gated RMSNorm of KDA's output (model.md sections 3.1 and 3.3, step 7)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gated_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in float32, round to the dtype of ``x``, then scale.

    Args:
        x: ``[..., D]``.
        weight_D: Scale in the dtype of ``x``.
        eps: Added to the mean square.

    Returns:
        ``[..., D]`` in the dtype of ``x``.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight_D


def gated_rms_norm(x: Tensor, weight_D: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return ``RMSNorm(x) * weight * sigmoid(gate)``, all in float32 with one rounding.

    Args:
        x: ``[..., D]``.
        weight_D: float32 scale.
        gate: ``[..., D]`` gate logits.
        eps: Added to the mean square.

    Returns:
        ``[..., D]`` in the dtype of ``x``.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return (normed * torch.sigmoid(gate.float())).to(x.dtype)
