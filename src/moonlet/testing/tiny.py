"""A K3-graph model small enough to build and run inside one unit test."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moonlet.core.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moonlet.model.transformer import Transformer

__all__ = ["tiny_config", "tiny_model"]


def tiny_config(**changes: Any) -> ModelConfig:
    """Return a small configuration with every mechanism of K3.

    Four layers (KDA, KDA, KDA, Gated MLA), dense first FFN and latent experts after it, AttnRes
    blocks of two layers, SiTU. The vocabulary is that of `ByteTokenizer`: 256 bytes and the 256
    control ids.

    Args:
        **changes: Fields of `ModelConfig` to replace.
    """
    config = ModelConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=64,
        kda_layers=(0, 1, 2),
        moe_layers=(1, 2, 3),
        kda=KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=-5.0, use_full_rank_gate=True),
        mla=MLAConfig(
            num_attention_heads=2,
            q_lora_rank=16,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            mla_use_output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=4,
            num_experts_per_token=2,
            moe_intermediate_size=32,
            num_shared_experts=1,
            routed_expert_hidden_size=32,
            latent_moe_use_norm=True,
        ),
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        attn_res_block_size=2,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=511,
    )
    return dataclasses.replace(config, **changes)


def tiny_model(config: ModelConfig | None = None, *, seed: int = 0) -> Transformer:
    """Return a `Transformer` with random weights, float32, in evaluation mode.

    Matrices are drawn with variance 1 / input width, what attention writes is damped and the head
    halved: rounding then moves logits by less than 5e-5, while the best two are usually 1e-2 or
    more apart. Norms stay near 1.
    """
    model = Transformer(tiny_config() if config is None else config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif tensor.ndim < 2:
                tensor.copy_(0.3 * noise)
            else:
                damping = 0.3 if "o_proj" in name else 0.5 if "lm_head" in name else 1.0
                tensor.copy_(damping * noise / tensor.shape[-1] ** 0.5)
    return model.eval()
