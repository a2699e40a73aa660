"""From logits to a drawn id: temperature, min-p, top-k, top-p, inverse of the distribution.

Each filter works on what the one before left over (speculative.md section 5.1); a tie at a cut
keeps the lower id. Everything is float64. The uniform numbers come from the caller, so a draw is a
function of its arguments.

Letters: M rows, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Filters", "distribution", "draw", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Parameters of M rows as float64 columns; None where no row uses the filter.

    Attributes:
        temperature_M1: Above 0.
        min_p_M1: Ids below this share of the best probability go; 0 keeps all.
        top_k_M1: Whole numbers of at least 1; W keeps all.
        top_p_M1: Ids go that more probable ones with this mass stand before; 1 keeps all.
    """

    temperature_M1: Tensor
    min_p_M1: Tensor | None = None
    top_k_M1: Tensor | None = None
    top_p_M1: Tensor | None = None


def distribution(logits_MW: Tensor, filters: Filters) -> Tensor:
    """Return what is drawn from.

    Args:
        logits_MW: float32, every row with a finite maximum and no NaN; -inf entries allowed.
        filters: Parameters of the M rows.

    Returns:
        float64 ``[M, W]``; rows sum to 1. Ties at a cut keep the lower id.
    """
    # the largest logit is taken off first, so that a tiny temperature cannot overflow
    shifted_MW = logits_MW.double() - logits_MW.amax(dim=1, keepdim=True)
    probabilities_MW = torch.softmax(shifted_MW / filters.temperature_M1, dim=1)
    if filters.min_p_M1 is not None:
        floor_M1 = filters.min_p_M1 * probabilities_MW.amax(dim=1, keepdim=True)
        probabilities_MW = probabilities_MW.masked_fill(probabilities_MW < floor_M1, 0.0)
    if filters.top_k_M1 is not None or filters.top_p_M1 is not None:
        probabilities_MW = _cut_tail(probabilities_MW, filters)
    return probabilities_MW / probabilities_MW.sum(dim=1, keepdim=True)


def _cut_tail(probabilities_MW: Tensor, filters: Filters) -> Tensor:
    sorted_MW, ids_MW = probabilities_MW.sort(dim=1, descending=True, stable=True)
    if filters.top_k_M1 is not None:
        rank_W = torch.arange(sorted_MW.shape[1], device=sorted_MW.device)
        sorted_MW = sorted_MW.masked_fill(rank_W >= filters.top_k_M1, 0.0)
    if filters.top_p_M1 is not None:
        sums_MW = sorted_MW.cumsum(dim=1)
        before_MW = (sums_MW - sorted_MW) / sums_MW[:, -1:]
        is_cut_MW = (before_MW >= filters.top_p_M1) & (filters.top_p_M1 < 1)
        is_cut_MW[:, 0] = False
        sorted_MW = sorted_MW.masked_fill(is_cut_MW, 0.0)
    return torch.zeros_like(sorted_MW).scatter_(1, ids_MW, sorted_MW)


def draw(probabilities_MW: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Invert the cumulative distribution in vocabulary order.

    Args:
        probabilities_MW: float64, rows sum to about 1.
        uniforms: One number in [0, 1) per row.

    Returns:
        int64 ``[M]``; never an id of probability 0.
    """
    sums_MW = probabilities_MW.cumsum(dim=1)
    target_M1 = torch.tensor(uniforms, dtype=torch.float64, device=sums_MW.device).unsqueeze(1)
    # below the total, so that the answer stays left of the zero tail
    target_M1 = torch.minimum(target_M1 * sums_MW[:, -1:], sums_MW[:, -1:] * (1 - 2.0**-52))
    return torch.searchsorted(sums_MW, target_M1, right=True).squeeze(1)


def sample(logits_MW: Tensor, filters: Filters, uniforms: Sequence[float]) -> Tensor:
    """Draw one id of every row.

    Args:
        logits_MW: As for `distribution`.
        filters: Parameters of the M rows.
        uniforms: One number in [0, 1) per row.

    Returns:
        int64 ``[M]``.
    """
    return draw(distribution(logits_MW, filters), uniforms)
