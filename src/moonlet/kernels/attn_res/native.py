"""AttnRes mix in native code, forward and backward (training.md section 4.3).

Per row only the softmax weights and norm factors of the sources are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonlet.kernels import _native_training

__all__ = ["attn_res_mix"]


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_D: Tensor, eps: float, *sources_TD: Tensor) -> Tensor:
        rows, size = sources_TD[0].shape
        count = len(sources_TD)
        out_TD = torch.empty_like(sources_TD[0])
        alpha_TN, rstd_TN = weight_D.new_empty(rows, count), weight_D.new_empty(rows, count)
        _native_training.call(
            "attn_res_forward",
            *(_native_training.pointers(sources_TD), count, weight_D),
            *(out_TD, alpha_TN, rstd_TN, rows, size, eps),
        )
        ctx.save_for_backward(weight_D, alpha_TN, rstd_TN, *sources_TD)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight_D, alpha_TN, rstd_TN, *sources_TD = ctx.saved_tensors
        rows, size = sources_TD[0].shape
        dsources_TD = [torch.empty_like(x) for x in sources_TD]
        dweight_D = torch.zeros_like(weight_D)
        dout_TD = gradients[0].contiguous()
        _native_training.call(
            "attn_res_backward",
            *(_native_training.pointers(sources_TD), len(sources_TD), weight_D),
            *(alpha_TN, rstd_TN, dout_TD, _native_training.pointers(dsources_TD)),
            *(dweight_D, rows, size),
        )
        return dweight_D, None, *dsources_TD


def attn_res_mix(
    blocks: Sequence[Tensor], prefix_TD: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    """Arguments and result as in `reference.attn_res_mix`; float32, multiples of 16 only."""
    if not blocks:
        return prefix_TD
    for block_TD in blocks:
        _native_training.require_shape("block", block_TD, *prefix_TD.shape)
    _native_training.require_shape("weight", weight_D, prefix_TD.shape[-1])
    sources = [x.contiguous() for x in (*blocks, prefix_TD)]
    return _Mix.apply(weight_D.contiguous(), eps, *sources)
