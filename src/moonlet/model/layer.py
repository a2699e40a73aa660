"""One decoder layer: attention and FFN around a depth stream (model.md section 3.2)."""

from __future__ import annotations

import torch
from torch import nn

from moonlet.core.config import ModelConfig
from moonlet.kernels.registry import Kernels
from moonlet.model.attn_res import DepthStream, mix_modules
from moonlet.model.kda import KDA
from moonlet.model.latent_moe import LatentMoE
from moonlet.model.layers import GatedMLP, Linear, RMSNorm
from moonlet.model.mla import GatedMLA
from moonlet.model.state import BatchMeta, ModelState

__all__ = ["DecoderLayer"]


class DecoderLayer(nn.Module):
    """KDA or Gated MLA, then dense FFN or MoE, each behind its norm."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.is_kda = config.is_kda(index)
        block = config.attn_res_block_size
        self.starts_block = block is not None and index % block == 0
        self.input_layernorm = RMSNorm(hidden, eps, kernels, dtype, device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, kernels, dtype, device)
        attention = KDA if self.is_kda else GatedMLA
        self.self_attn = attention(config, kernels, dtype, device)
        self.ffn: nn.Module
        if config.is_moe(index) and config.moe is not None:
            self.ffn = LatentMoE(config, config.moe, kernels, dtype, device)
        else:
            self.ffn = GatedMLP(config, config.intermediate_size, kernels, dtype, device)
        self.self_attention_res_norm: RMSNorm | None = None
        self.self_attention_res_proj: Linear | None = None
        self.mlp_res_norm: RMSNorm | None = None
        self.mlp_res_proj: Linear | None = None
        if block is not None:
            parts = (hidden, eps, kernels, dtype, device)
            self.self_attention_res_norm, self.self_attention_res_proj = mix_modules(*parts)
            self.mlp_res_norm, self.mlp_res_proj = mix_modules(*parts)

    def mix_parts(self) -> list[tuple[RMSNorm, Linear]]:
        """Norm and projection of the attention mix and the FFN mix; empty without AttnRes."""
        pairs = (
            (self.self_attention_res_norm, self.self_attention_res_proj),
            (self.mlp_res_norm, self.mlp_res_proj),
        )
        return [(norm, proj) for norm, proj in pairs if norm is not None and proj is not None]

    def forward(self, stream: DepthStream, meta: BatchMeta, state: ModelState) -> None:
        """Advance ``stream`` by this layer; attention updates ``state``."""
        x_TD = self.input_layernorm(stream.read())
        if self.starts_block:
            stream.close_block()
        memory = state.kda(self.index) if self.is_kda else state.mla(self.index)
        stream.add(self.self_attn(x_TD, meta, memory))
        stream.add(self.ffn(self.post_attention_layernorm(stream.read())))
