"""Routed experts from packed MXFP4 weights (model.md sections 2.6 and 3.5).

``u = sum_e weight_e * w2_e(act(w1_e z, w3_e z))`` with the matrices decoded expert by expert. The
inputs of the products may be rounded:

    bf16         not at all: the weights are exact, the activations keep their dtype (W4A16)
    mxfp8        MXFP8 with ceil scales, as quantisation-aware training of K3 rounds them
    mxfp8-floor  MXFP8 with floor scales
    int8         groups of 32 with one float32 scale

Letters: T packed rows, A experts per token, E experts, R input width, F intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from moonlet.kernels import int8_groups, mxfp8
from moonlet.kernels.moe_experts.reference import moe_experts
from moonlet.kernels.mxfp4 import Packed
from moonlet.kernels.situ.gated import GatedActivation

__all__ = ["MODES", "moe_mxfp4"]

MODES: Mapping[str, Callable[[Tensor], Tensor] | None] = {
    "bf16": None,
    "mxfp8": mxfp8.fake_quantize,
    "mxfp8-floor": partial(mxfp8.fake_quantize, rule="floor"),
    "int8": int8_groups.fake_quantize,
}


def moe_mxfp4(
    z_TR: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    w1_EFR: Packed,
    w3_EFR: Packed,
    w2_ERF: Packed,
    activation: GatedActivation,
    mode: str = "bf16",
) -> Tensor:
    """Run the selected experts, one expert after the other.

    Args:
        z_TR: Expert input, model dtype.
        ids_TA: Selected experts per row, int64.
        weights_TA: float32 weights.
        w1_EFR: Gate projections.
        w3_EFR: Up projections.
        w2_ERF: Down projections.
        activation: Gated activation of (gate, up).
        mode: A key of `MODES`.

    Returns:
        ``[T, R]`` float32.
    """
    chosen = ids_TA.unique()
    place_of_E = ids_TA.new_full((w1_EFR.packed.shape[0],), -1)
    place_of_E[chosen] = chosen.new_tensor(range(len(chosen)))
    w1, w3, w2 = (w.of(chosen).dequantize(z_TR.dtype) for w in (w1_EFR, w3_EFR, w2_ERF))
    return moe_experts(z_TR, place_of_E[ids_TA], weights_TA, w1, w3, w2, activation, MODES[mode])
