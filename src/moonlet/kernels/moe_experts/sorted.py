"""Routed experts over rows sorted by expert, with its own backward (training.md section 4.2).

Each expert's rows are one contiguous range, so a matrix product per expert needs no padding. The
backward keeps the sorted input and the products; the gradient of a routing weight uses

    dp = <dU, W2 h> = <W2^T dU, h>

so the expert output is not kept.

Letters: T packed rows, A experts per token, E experts, R input width, F intermediate width,
J sorted pairs = T * A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonlet.kernels.moe_experts.reference import Activation, InputTransform

__all__ = ["moe_experts"]


class _ExpertLinear(torch.autograd.Function):
    """``y[range of e] = x[range of e] W_e^T`` for every expert e."""

    @staticmethod
    def forward(ctx: Any, x_JI: Tensor, weight_EOI: Tensor, sizes: Sequence[int]) -> Tensor:
        y_JO = x_JI.new_empty(x_JI.shape[0], weight_EOI.shape[1])
        for x, w, y in zip(x_JI.split(sizes), weight_EOI, y_JO.split(sizes), strict=True):
            torch.mm(x, w.mT, out=y)
        ctx.save_for_backward(x_JI, weight_EOI)
        ctx.sizes = sizes
        return y_JO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_JI, weight_EOI = ctx.saved_tensors
        dy_JO = gradients[0].contiguous()
        dx_JI, dweight_EOI = torch.empty_like(x_JI), torch.empty_like(weight_EOI)
        parts = (x_JI, dy_JO, dx_JI)
        for (x, dy, dx), w, dw in zip(
            zip(*(p.split(ctx.sizes) for p in parts), strict=True),
            weight_EOI,
            dweight_EOI,
            strict=True,
        ):
            torch.mm(dy, w, out=dx)
            torch.mm(dy.mT, x, out=dw)
        return dx_JI, dweight_EOI, None


class _Dispatch(torch.autograd.Function):
    """Gather rows in expert order; the backward adds a row's A copies by the inverse order."""

    @staticmethod
    def forward(ctx: Any, z_TR: Tensor, order_J: Tensor, inverse_J: Tensor, top: int) -> Tensor:
        ctx.save_for_backward(inverse_J)
        ctx.top = top
        return z_TR.index_select(0, order_J // top)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_J,) = ctx.saved_tensors
        back_JR = gradients[0].index_select(0, inverse_J)
        return back_JR.view(-1, ctx.top, back_JR.shape[1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Undo the order and add a row's expert outputs with their weights."""

    @staticmethod
    def forward(
        ctx: Any, y_JR: Tensor, weights_TA: Tensor, order_J: Tensor, inverse_J: Tensor
    ) -> Tensor:
        y_TAR = y_JR.index_select(0, inverse_J).view(*weights_TA.shape, -1).float()
        ctx.save_for_backward(y_TAR, weights_TA, order_J)
        ctx.dtype = y_JR.dtype
        return torch.bmm(weights_TA[:, None], y_TAR)[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y_TAR, weights_TA, order_J = ctx.saved_tensors
        du_TR = gradients[0]
        dweights_TA = torch.bmm(y_TAR, du_TR[..., None])[..., 0]
        top = weights_TA.shape[1]
        dy_JR = du_TR.index_select(0, order_J // top)
        dy_JR.mul_(weights_TA.flatten().index_select(0, order_J)[:, None])
        return dy_JR.to(ctx.dtype), dweights_TA, None, None


def moe_experts(
    z_TR: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    activation: Activation,
    transform: InputTransform | None = None,
) -> Tensor:
    """Run the selected experts; arguments and result as in `reference.moe_experts`."""
    if transform is not None:
        z_TR = transform(z_TR)
    ids_J = ids_TA.flatten()
    order_J = torch.argsort(ids_J, stable=True)
    inverse_J = torch.empty_like(order_J)
    inverse_J[order_J] = torch.arange(ids_J.numel(), device=ids_J.device)
    sizes = torch.bincount(ids_J, minlength=w1_EFR.shape[0]).tolist()
    z_JR = _Dispatch.apply(z_TR, order_J, inverse_J, ids_TA.shape[1])
    gate_JF = _ExpertLinear.apply(z_JR, w1_EFR, sizes)
    hidden_JF = activation(gate_JF, _ExpertLinear.apply(z_JR, w3_EFR, sizes))
    if transform is not None:
        hidden_JF = transform(hidden_JF)
    y_JR = _ExpertLinear.apply(hidden_JF, w2_ERF, sizes)
    return _Combine.apply(y_JR, weights_TA, order_J, inverse_J)
