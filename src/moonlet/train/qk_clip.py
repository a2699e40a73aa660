"""QK-Clip: bounds the attention logits of Gated MLA by scaling weights (training.md 2.3).

Per head with largest scaled logit S > tau, gamma = tau / S multiplies every logit of the head:

    q_b_proj   first nope rows of the head     sqrt(gamma)
    kv_b_proj  first nope rows of the head     sqrt(gamma)      (value rows untouched)
    q_b_proj   last rope rows of the head      gamma            (their key is shared by all heads)

KDA needs none: its queries and keys are L2-normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moonlet.core.config import MLAConfig

__all__ = ["MaxReducer", "QKClip", "clip_heads"]


class MaxReducer(Protocol):
    """What the clip asks of the process group."""

    world_size: int

    def max_(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over all processes."""


@torch.no_grad()
def clip_heads(
    query_weight: Tensor, kv_weight: Tensor, max_logits_H: Tensor, config: MLAConfig, tau: float
) -> int:
    """Scale the heads whose largest logit exceeds ``tau``; modifies both weights in place.

    Args:
        query_weight: ``q_b_proj`` (or ``q_proj``) weight [H * (nope + rope), in].
        kv_weight: ``kv_b_proj`` weight [H * (nope + v), kv_lora_rank].
        max_logits_H: Largest scaled logit of each head, float32.
        config: Head counts and widths.
        tau: Bound, positive.

    Returns:
        Number of heads that were scaled.
    """
    gamma_H11 = (tau / max_logits_H.clamp_min(tau)).view(-1, 1, 1)
    num_heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    query_heads = query_weight.view(num_heads, config.qk_head_dim, -1)
    kv_heads = kv_weight.view(num_heads, nope + config.v_head_dim, -1)
    query_heads[:, :nope].mul_(gamma_H11.sqrt())
    query_heads[:, nope:].mul_(gamma_H11)
    kv_heads[:, :nope].mul_(gamma_H11.sqrt())
    return int((max_logits_H > tau).sum())


class QKClip:
    """Keeps the largest logit of every MLA head of a step and clips after the update.

    Args:
        attentions: GatedMLA modules by name; their ``max_logit_observer`` is taken over.
        config: Head counts and widths.
        tau: Bound on the scaled logits.
    """

    def __init__(
        self, attentions: Mapping[str, nn.Module], config: MLAConfig, tau: float = 100.0
    ) -> None:
        self._config = config
        self._tau = tau
        self._modules: list[Any] = list(attentions.values())
        self._maxima_LH = torch.full((len(self._modules), config.num_attention_heads), -torch.inf)
        for index, module in enumerate(self._modules):
            module.max_logit_observer = self._observer(index)

    def _observer(self, index: int) -> Any:
        def observe(max_logits_H: Tensor) -> None:
            row_H = self._maxima_LH[index]
            torch.maximum(row_H, max_logits_H.detach(), out=row_H)

        return observe

    @property
    def max_logit(self) -> float:
        """Largest logit seen since the last `apply`, over the layers of this process."""
        return float(self._maxima_LH.max()) if self._modules else 0.0

    def reduce(self, reducer: MaxReducer) -> None:
        """Take the maximum over all processes."""
        if self._modules and reducer.world_size > 1:
            reducer.max_(self._maxima_LH)

    def apply(self, *, clip: bool = True) -> int:
        """Clip the masters in place, clear the maxima; return the number of scaled heads."""
        num_clipped = 0
        if clip:
            for row_H, module in zip(self._maxima_LH, self._modules, strict=True):
                query = module.q_b_proj if self._config.q_lora_rank is not None else module.q_proj
                num_clipped += clip_heads(
                    query.weight.data, module.kv_b_proj.weight.data, row_H, self._config, self._tau
                )
        self._maxima_LH.fill_(-torch.inf)
        return num_clipped
