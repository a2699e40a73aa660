"""SiTU-GLU in native code, forward and backward (training.md section 4.1).

Only gate and up are kept for the backward; eager code keeps five temporaries per element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonlet.kernels import _native_training

__all__ = ["situ_glu"]


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        out = torch.empty_like(gate)
        _native_training.call("situ_forward", gate, up, out, gate.numel(), beta, linear_beta)
        ctx.save_for_backward(gate, up)
        ctx.betas = (beta, linear_beta)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        dout = gradients[0].contiguous()
        _native_training.call("situ_backward", gate, up, dout, dgate, dup, gate.numel(), *ctx.betas)
        return dgate, dup, None, None


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Arguments and result as in `reference.situ_glu`; float32 only."""
    _native_training.require_shape("up", up, *gate.shape)
    cap = 0.0 if linear_beta is None else linear_beta
    return _SituGLU.apply(gate.contiguous(), up.contiguous(), beta, cap)
