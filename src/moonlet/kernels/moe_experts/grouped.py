"""Routed experts as a few batched products instead of a loop over experts.

Many rows: (row, expert) pairs are sorted by expert and padded to the busiest expert, one batched
product per matrix. Few rows: the selected experts' matrices are gathered per pair. The sort is
undone by gathering the inverse permutation, so the sum over a row's experts has a fixed order.

Letters: T packed rows, A experts per token, E experts, R input width, F intermediate width,
J pairs = T * A, B rows of the busiest expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.kernels.moe_experts.reference import Activation, InputTransform

__all__ = ["moe_experts"]

# up to this many pairs it is cheaper to gather matrices than to pad every expert
MAX_GATHERED_PAIRS = 32


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
    if ids_TA.numel() <= MAX_GATHERED_PAIRS:
        y_JR = _gathered(z_TR, ids_TA, w1_EFR, w3_EFR, w2_ERF, activation, transform)
    else:
        y_JR = _padded(z_TR, ids_TA, w1_EFR, w3_EFR, w2_ERF, activation, transform)
    y_TAR = y_JR.view(*ids_TA.shape, -1).float()
    return (y_TAR * weights_TA[..., None]).sum(1)


def _gathered(
    z_TR: Tensor,
    ids_TA: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    activation: Activation,
    transform: InputTransform | None,
) -> Tensor:
    ids_J = ids_TA.flatten()
    z_JR1 = z_TR.repeat_interleave(ids_TA.shape[1], dim=0)[..., None]
    hidden = activation((w1_EFR[ids_J] @ z_JR1)[..., 0], (w3_EFR[ids_J] @ z_JR1)[..., 0])
    if transform is not None:
        hidden = transform(hidden)
    return (w2_ERF[ids_J] @ hidden[..., None])[..., 0]


def _padded(
    z_TR: Tensor,
    ids_TA: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    activation: Activation,
    transform: InputTransform | None,
) -> Tensor:
    num_experts = w1_EFR.shape[0]
    ids_J = ids_TA.flatten()
    order_J = torch.argsort(ids_J, stable=True)
    counts_E = torch.bincount(ids_J, minlength=num_experts)
    busiest = int(counts_E.max())
    starts_E = counts_E.cumsum(0) - counts_E
    sorted_J = ids_J[order_J]
    ranks = torch.arange(ids_J.numel(), device=ids_J.device)
    place_J = sorted_J * busiest + ranks - starts_E[sorted_J]
    rows_J = order_J // ids_TA.shape[1]
    z_EBR = z_TR.new_zeros((num_experts * busiest, z_TR.shape[1]))
    z_EBR = z_EBR.index_copy(0, place_J, z_TR.index_select(0, rows_J))
    z_EBR = z_EBR.view(num_experts, busiest, -1)
    hidden = activation(z_EBR @ w1_EFR.transpose(1, 2), z_EBR @ w3_EFR.transpose(1, 2))
    if transform is not None:
        hidden = transform(hidden)
    y_EBR = (hidden @ w2_ERF.transpose(1, 2)).flatten(0, 1)
    inverse_J = torch.empty_like(order_J)
    inverse_J[order_J] = place_J
    return y_EBR.index_select(0, inverse_J)
