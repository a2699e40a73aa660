"""Router: scores, selection bias, group limit, top-k, weights (model.md section 3.5, steps 1-3).

The bias chooses experts but never weighs them. Ties go to the lowest expert index.

Letters: T packed rows, D hidden, E experts, A experts per token, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moonlet.core.config import MoEConfig

__all__ = ["RouteResult", "route_topk"]


class RouteResult(NamedTuple):
    """Selected experts with their float32 weights, and what balancing needs.

    Attributes:
        ids_TA: Selected experts, best first.
        weights_TA: Unbiased, renormalised and scaled weights.
        scores_TE: Unbiased scores.
        cut_T: The best biased score that was not selected (minus infinity when A = E).
    """

    ids_TA: Tensor
    weights_TA: Tensor
    scores_TE: Tensor
    cut_T: Tensor


def _limit_groups(biased_TE: Tensor, moe: MoEConfig) -> Tensor:
    """Keep the ``topk_group`` groups whose two best scores sum highest."""
    groups, keep = moe.num_expert_group, moe.topk_group
    if groups <= 1 or groups <= keep:
        return biased_TE
    grouped = biased_TE.unflatten(1, (groups, -1))
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :keep]
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)


def route_topk(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, moe: MoEConfig) -> RouteResult:
    """Choose experts for every row, all in float32.

    Args:
        x_TD: Layer input (after the norm).
        weight_ED: Router weight.
        bias_E: float32 selection bias.
        moe: Router rules.
    """
    logits_TE = x_TD.float() @ weight_ED.float().T
    if moe.moe_router_activation_func == "softmax":
        scores_TE = torch.softmax(logits_TE, dim=-1)
    else:
        scores_TE = torch.sigmoid(logits_TE)
    biased_TE = _limit_groups(scores_TE.detach() + bias_E, moe)
    ranked = biased_TE.sort(dim=-1, descending=True, stable=True)
    top = moe.num_experts_per_token
    ids_TA = ranked.indices[:, :top]
    weights_TA = scores_TE.gather(1, ids_TA)
    if top > 1 and moe.moe_renormalize:
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + 1e-20)
    if top < moe.num_experts:
        cut_T = ranked.values[:, top]
    else:
        cut_T = torch.full_like(biased_TE[:, 0], float("-inf"))
    return RouteResult(ids_TA, weights_TA * moe.routed_scaling_factor, scores_TE, cut_T)
