"""Native router for inference (model.md section 3.5, steps 1-3): product, sigmoid, top-k, weights.

The weight is read as it is stored, float32 or bfloat16; everything else is float32. Sums over the
hidden size have one fixed order, so a row routes alike alone and in any batch. Left to the
reference: softmax scores and the group limit, which no published checkpoint uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.core.config import MoEConfig
from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.route_topk.reference import RouteResult
from moonlet.kernels.spec import Spec

__all__ = ["refusal", "route_topk"]

MAX_EXPERTS = 1024
MAX_TOP_K = 32


def refusal(spec: Spec) -> str | None:
    """Return why the native router cannot serve, or None if it can."""
    moe = None if spec.config is None else spec.config.moe
    return _native_ops.refusal(spec) or (None if moe is None else _unfit(moe))


def _unfit(moe: MoEConfig) -> str | None:
    if moe.moe_router_activation_func != "sigmoid":
        return f"the native router has sigmoid scores, not {moe.moe_router_activation_func}"
    if moe.num_expert_group > max(1, moe.topk_group):
        return "the native router has no group limit"
    if moe.num_experts > MAX_EXPERTS or moe.num_experts_per_token > MAX_TOP_K:
        return (
            f"the native router takes {MAX_TOP_K} of {MAX_EXPERTS} experts at most, not "
            f"{moe.num_experts_per_token} of {moe.num_experts}"
        )
    return None


def route_topk(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, moe: MoEConfig) -> RouteResult:
    """Arguments and result as in `reference.route_topk`.

    Raises:
        ShapeError: ``x_TD`` is not float32, the weight neither float32 nor bfloat16, a shape does
            not fit, or the rules are none that `refusal` accepts.
    """
    rows, size = x_TD.shape
    experts, top = moe.num_experts, moe.num_experts_per_token
    reason = _unfit(moe)
    if reason is not None:
        raise ShapeError(reason)
    _native_ops.require("x", x_TD, torch.float32, rows, size)
    is_bf16 = weight_ED.dtype == torch.bfloat16
    stored = torch.bfloat16 if is_bf16 else torch.float32
    _native_ops.require("weight", weight_ED, stored, experts, size)
    _native_ops.require("bias", bias_E, torch.float32, experts)
    ids_TA = torch.empty(rows, top, dtype=torch.int64)
    weights_TA = torch.empty(rows, top, dtype=torch.float32)
    scores_TE = torch.empty(rows, experts, dtype=torch.float32)
    cut_T = torch.empty(rows, dtype=torch.float32)
    _native_ops.call(
        "route_topk",
        *(x_TD.contiguous(), weight_ED, int(is_bf16), bias_E),
        *(scores_TE, ids_TA, weights_TA, cut_T, rows, size, experts, top),
        *(int(moe.moe_renormalize), moe.routed_scaling_factor),
    )
    return RouteResult(ids_TA, weights_TA, scores_TE, cut_T)
