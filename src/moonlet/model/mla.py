"""Gated multi-head latent attention layer (model.md section 3.4; report section 2.2).

No rotary embedding. The cache holds one normalised latent and one shared key part per token.

Letters: T packed rows, D hidden, H heads, Q query width, R kv_lora_rank, P shared key width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moonlet.core.config import ModelConfig
from moonlet.kernels.registry import Kernels
from moonlet.model.layers import Linear, RMSNorm
from moonlet.model.state import BatchMeta, MLACache

__all__ = ["GatedMLA"]

# the latent norms take the class default, not rms_norm_eps (model.md section 3.1)
LATENT_NORM_EPS = 1e-6


class GatedMLA(nn.Module):
    """One Gated MLA layer.

    Attributes:
        max_logit_observer: In training, called with each head's largest scaled score ``[H]``
            (QK-Clip); None outside training.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        mla, hidden = config.mla, config.hidden_size
        heads = mla.num_attention_heads
        self.num_heads = heads
        self.latent_size, self.shared_size = mla.kv_lora_rank, mla.qk_rope_head_dim
        self._has_query_latent = mla.q_lora_rank is not None
        if mla.q_lora_rank is not None:
            self.q_a_proj = Linear(hidden, mla.q_lora_rank, dtype, device)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS, kernels, dtype, device)
            self.q_b_proj = Linear(mla.q_lora_rank, heads * mla.qk_head_dim, dtype, device)
        else:
            self.q_proj = Linear(hidden, heads * mla.qk_head_dim, dtype, device)
        self.kv_a_proj_with_mqa = Linear(hidden, mla.cache_size, dtype, device)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS, kernels, dtype, device)
        expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b_proj = Linear(mla.kv_lora_rank, expanded, dtype, device)
        self._has_gate = mla.mla_use_output_gate
        if self._has_gate:
            self.g_proj = Linear(hidden, heads * mla.v_head_dim, dtype, device)
        self.o_proj = Linear(heads * mla.v_head_dim, hidden, dtype, device)
        self.max_logit_observer: Callable[[Tensor], None] | None = None
        self._kernels = kernels

    def forward(self, x_TD: Tensor, meta: BatchMeta, cache: MLACache) -> Tensor:
        """Append the rows to ``cache`` and attend; ``[T, D] -> [T, D]``."""
        query = self.q_a_proj if self._has_query_latent else self.q_proj
        groups = [(query.stored,), (self.kv_a_proj_with_mqa.stored,)]
        if self._has_gate:
            groups.append((self.g_proj.stored,))
        q, compressed, *gate = self._kernels.linear_many(x_TD, groups)
        if self._has_query_latent:
            q = self.q_b_proj(self.q_a_layernorm(q))
        latent_TR = self.kv_a_layernorm(compressed[:, : self.latent_size])
        cache.append(meta, latent_TR, compressed[:, self.latent_size :])
        o_TF = self._attend(q.unflatten(-1, (self.num_heads, -1)), meta, cache).flatten(1)
        if self._has_gate:
            o_TF = self._kernels.sigmoid_gate(o_TF, *gate)
        return self.o_proj(o_TF)

    def _attend(self, q_THQ: Tensor, meta: BatchMeta, cache: MLACache) -> Tensor:
        """Absorbed attention for decode rows and windows, expanded attention for the rest."""
        kv_b_HOR = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        decode, other = meta.parts
        outputs: list[Tensor] = []
        rows: list[Tensor] = []
        if decode is not None:
            # rows of a window see different parts of one context
            is_stepping = decode.ragged.is_single_rows
            context = cache.view(meta) if is_stepping else cache.view_rows(meta)
            if not decode.is_whole:
                context = context.select(decode.seqs if is_stepping else decode.rows)
            queries = q_THQ if decode.is_whole else q_THQ[decode.rows]
            outputs.append(self._kernels.mla_decode(queries, context, kv_b_HOR))
            rows.append(decode.rows)
        if other is not None:
            pages = cache.view(meta)
            context = pages if other.is_whole else pages.select(other.seqs)
            queries = q_THQ if other.is_whole else q_THQ[other.rows]
            observe = self.training and self.max_logit_observer is not None
            result = self._kernels.mla_prefill(queries, context, kv_b_HOR, other.ragged, observe)
            if observe and self.max_logit_observer is not None:
                self.max_logit_observer(result.max_score_H)
            outputs.append(result.o_THV)
            rows.append(other.rows)
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs)[torch.cat(rows).argsort()]
