"""Routed experts with plain weights, each expert's products in native code."""

from __future__ import annotations

from torch import Tensor

from moonlet.kernels.linear.cpu import linear
from moonlet.kernels.moe_experts.reference import Activation, InputTransform

__all__ = ["moe_experts"]


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
    """Arguments and result as in `reference.moe_experts`; weights are float32 or bfloat16."""
    if transform is not None:
        z_TR = transform(z_TR)
    out_TAR = z_TR.new_zeros((*ids_TA.shape, w2_ERF.shape[1]))
    for expert in ids_TA.unique().tolist():
        token, place = (ids_TA == expert).nonzero(as_tuple=True)
        z = z_TR[token]
        hidden = activation(linear(z, w1_EFR[expert]), linear(z, w3_EFR[expert]))
        if transform is not None:
            hidden = transform(hidden)
        out_TAR[token, place] = linear(hidden, w2_ERF[expert]) * weights_TA[token, place, None]
    return out_TAR.sum(1)
