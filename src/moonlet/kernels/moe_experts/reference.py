"""Routed experts: weighted sum of small gated MLPs (model.md section 3.5, step 5).

``u = sum_e weight_e * w2_e(act(w1_e z, w3_e z))``; experts run in the model dtype, products with
the weights and the sum in float32.

Letters: T packed rows, A experts per token, E experts, R input width, F intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Activation", "InputTransform", "moe_experts"]

Activation = Callable[[Tensor, Tensor], Tensor]
InputTransform = Callable[[Tensor], Tensor]


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
    """Run the selected experts, one expert after the other.

    Args:
        z_TR: Expert input, model dtype.
        ids_TA: Selected experts per row.
        weights_TA: float32 weights.
        w1_EFR: Gate projections.
        w3_EFR: Up projections.
        w2_ERF: Down projections.
        activation: Gated activation of (gate, up).
        transform: Applied to the inputs of w1/w3 and of w2 (activation quantisation), or None.

    Returns:
        ``[T, R]`` float32.
    """
    if transform is not None:
        z_TR = transform(z_TR)
    out_TAR: Tensor = z_TR.new_zeros((*ids_TA.shape, w2_ERF.shape[1]), dtype=torch.float32)
    for expert in ids_TA.unique().tolist():
        token, place = (ids_TA == expert).nonzero(as_tuple=True)
        z = z_TR[token]
        hidden = activation(z @ w1_EFR[expert].T, z @ w3_EFR[expert].T)
        if transform is not None:
            hidden = transform(hidden)
        y = (hidden @ w2_ERF[expert].T).float() * weights_TA[token, place, None]
        out_TAR = out_TAR.index_put((token, place), y)
    return out_TAR.sum(1)
