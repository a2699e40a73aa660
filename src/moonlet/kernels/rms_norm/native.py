"""RMSNorm and the gated RMSNorm in native code, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonlet.kernels import _native_training

__all__ = ["gated_rms_norm", "rms_norm"]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        out, rstd = torch.empty_like(x), x.new_empty(x.numel() // size)
        _native_training.call("rms_norm_forward", x, weight_D, out, rstd, rstd.numel(), size, eps)
        ctx.save_for_backward(x, weight_D, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, rstd = ctx.saved_tensors
        dx, dweight_D = torch.empty_like(x), torch.zeros_like(weight_D)
        dout = gradients[0].contiguous()
        _native_training.call(
            "rms_norm_backward",
            *(x, weight_D, rstd, dout, dx, dweight_D, rstd.numel(), x.shape[-1]),
        )
        return dx, dweight_D, None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, gate: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        out, rstd = torch.empty_like(x), x.new_empty(x.numel() // size)
        _native_training.call(
            "gated_norm_forward", x, weight_D, gate, out, rstd, rstd.numel(), size, eps
        )
        ctx.save_for_backward(x, weight_D, gate, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, gate, rstd = ctx.saved_tensors
        dx, dgate = torch.empty_like(x), torch.empty_like(gate)
        dweight_D = torch.zeros_like(weight_D)
        dout = gradients[0].contiguous()
        _native_training.call(
            "gated_norm_backward",
            *(x, weight_D, gate, rstd, dout, dx, dgate, dweight_D, rstd.numel(), x.shape[-1]),
        )
        return dx, dweight_D, dgate, None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Arguments and result as in `reference.rms_norm`; float32 and multiples of 16 only."""
    _native_training.require_shape("weight", weight_D, x.shape[-1])
    return _RMSNorm.apply(x.contiguous(), weight_D, eps)


def gated_rms_norm(x: Tensor, weight_D: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Arguments and result as in `reference.gated_rms_norm`; float32, multiples of 16 only."""
    _native_training.require_shape("weight", weight_D, x.shape[-1])
    _native_training.require_shape("gate", gate, *x.shape)
    return _GatedRMSNorm.apply(x.contiguous(), weight_D, gate.contiguous(), eps)
