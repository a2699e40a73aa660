"""Short convolution with SiLU in native code, forward and backward.

The carry in front of a sequence takes part in the result but gets no gradient: no training here
runs through it. Emitted carries come from the reference's index arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonlet.kernels import _native_training
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.short_conv import reference
from moonlet.kernels.short_conv.reference import ShortConvResult

__all__ = ["short_conv"]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_JC: Tensor, carry_SCW: Tensor, ragged: Ragged
    ) -> Tensor:
        starts = _native_training.run_starts(ragged.seq_lens)
        taps, channels = weight_JC.shape
        y_TC = torch.empty_like(x_TC)
        _native_training.call(
            "short_conv_forward",
            *(x_TC, weight_JC, carry_SCW, starts, y_TC, ragged.num_seqs, channels, taps),
        )
        ctx.save_for_backward(x_TC, weight_JC, carry_SCW, starts)
        ctx.longest = ragged.max_len
        return y_TC

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_JC, carry_SCW, starts = ctx.saved_tensors
        taps, channels = weight_JC.shape
        dx_TC, dweight_JC = torch.empty_like(x_TC), torch.zeros_like(weight_JC)
        scratch = x_TC.new_empty(ctx.longest, channels)
        _native_training.call(
            "short_conv_backward",
            *(x_TC, weight_JC, carry_SCW, starts, gradients[0].contiguous()),
            *(dx_TC, dweight_JC, scratch, starts.numel() - 1, channels, taps),
        )
        return dx_TC, dweight_JC, None, None


def short_conv(
    x_TC: Tensor,
    weight_CJ: Tensor,
    carry_SCW: Tensor,
    ragged: Ragged,
    emit_at_E: Tensor | None = None,
) -> ShortConvResult:
    """Arguments and result as in `reference.short_conv`; float32 and multiples of 16 only."""
    if emit_at_E is not None or carry_SCW.requires_grad:
        return reference.short_conv(x_TC, weight_CJ, carry_SCW, ragged, emit_at_E)
    channels, taps = weight_CJ.shape
    _native_training.require_shape("x", x_TC, ragged.num_rows, channels)
    _native_training.require_shape("carry", carry_SCW, ragged.num_seqs, channels, taps - 1)
    x_TC = x_TC.contiguous()
    weight_JC = weight_CJ.transpose(0, 1).contiguous()
    y_TC = _ShortConv.apply(x_TC, weight_JC, carry_SCW.contiguous(), ragged)
    return ShortConvResult(y_TC, _new_carry(x_TC.detach(), carry_SCW, ragged), None)


def _new_carry(x_TC: Tensor, carry_SCW: Tensor, ragged: Ragged) -> Tensor:
    """The last W inputs of every sequence, from its rows and, where it is short, the old carry."""
    width = carry_SCW.shape[2]
    back_W = torch.arange(width, 0, -1)
    from_end_SW = ragged.lens_S[:, None] - back_W
    rows_SW = (ragged.starts_S[:, None] + from_end_SW).clamp_min(0)
    fresh_SWC = x_TC[rows_SW]
    old_SWC = carry_SCW.transpose(1, 2)
    kept_SW = (width + from_end_SW).clamp(0, width - 1)
    old_SWC = old_SWC.gather(1, kept_SW[..., None].expand(-1, -1, old_SWC.shape[2]))
    is_old_SW1 = (from_end_SW < 0)[..., None]
    return torch.where(is_old_SW1, old_SWC, fresh_SWC).transpose(1, 2)
