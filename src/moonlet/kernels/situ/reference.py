"""SiTU-GLU and SwiGLU (model.md section 3.5; Kimi K3 report, section 2).

``SiTU-GLU(g, u) = b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)``: both branches are capped, the
sigmoid reads the uncapped gate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["situ_glu", "swiglu"]


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Apply SiTU-GLU in float32 with one rounding.

    Args:
        gate: Gate projection, any shape.
        up: Up projection, same shape and dtype.
        beta: Cap of the gate branch.
        linear_beta: Cap of the up branch, or None for no cap.

    Returns:
        Same shape and dtype as ``gate``; absolute value at most ``beta * linear_beta``.
    """
    gate32, up32 = gate.float(), up.float()
    capped_gate = beta * torch.tanh(gate32 / beta) * torch.sigmoid(gate32)
    capped_up = up32 if linear_beta is None else linear_beta * torch.tanh(up32 / linear_beta)
    return (capped_gate * capped_up).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` in the model dtype (Kimi-Linear)."""
    return F.silu(gate) * up
