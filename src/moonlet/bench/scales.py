"""Architectures to measure: by name, from a checkpoint's configuration, or drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from moonlet.core.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import read_config

__all__ = ["SCALES", "k3_quarter", "random_config", "scale_config"]

SCALES = ("k3-quarter", "nano")


def k3_quarter() -> ModelConfig:
    """Return K3 at a quarter of its widths and counts.

    Hidden size, heads, experts, intermediate widths, layers and vocabulary are a quarter; what a
    kernel's inner loop runs over is K3's own: head widths 128 and 64, the key-value latent of 512,
    four taps.
    """
    return ModelConfig(
        vocab_size=40960,
        hidden_size=1792,
        num_hidden_layers=24,
        intermediate_size=8448,
        kda_layers=tuple(i for i in range(24) if i % 4 != 3),
        moe_layers=tuple(range(1, 24)),
        kda=KDAConfig(num_heads=24, head_dim=128, gate_lower_bound=-5.0, use_full_rank_gate=True),
        mla=MLAConfig(
            num_attention_heads=24,
            q_lora_rank=384,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            mla_use_output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=224,
            num_experts_per_token=4,
            moe_intermediate_size=768,
            num_shared_experts=2,
            routed_expert_hidden_size=896,
            latent_moe_use_norm=True,
        ),
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=1 << 20,
        attn_res_block_size=12,
    )


def scale_config(scale: str | None, directory: Path) -> tuple[str, ModelConfig]:
    """Return name and architecture of a scale, or those of a checkpoint folder.

    Args:
        scale: One of `SCALES` or None. ``nano`` stands for the folder, which is the bundled
            checkpoint then.
        directory: Folder with a ``config.json``.

    Raises:
        ConfigError: Another scale, or no usable configuration.
    """
    if scale == "k3-quarter":
        return scale, k3_quarter()
    if scale not in (None, *SCALES):
        raise ConfigError(f"--scale is {scale!r}; choose one of {', '.join(SCALES)}")
    return directory.resolve().name, read_config(directory).text


def random_config(rng: random.Random) -> ModelConfig:
    """Draw a small architecture with every mechanism.

    Half of the draws have widths that are multiples of 32, which some backends need; the others
    have any widths. Two of three have K3's gate.
    """
    step = rng.choice((1, 32))

    def width(most: int) -> int:
        return step * rng.randint(1, max(1, most // step))

    experts = rng.randint(2, 12)
    hidden = width(160)
    latent = rng.choice((None, width(96)))
    kda = KDAConfig(
        num_heads=rng.randint(1, 5),
        head_dim=width(128),
        short_conv_kernel_size=rng.choice((2, 3, 4)),
        gate_lower_bound=rng.choice((-5.0, -1.5, None)),
        use_full_rank_gate=True,
    )
    return replace(
        k3_quarter(),
        vocab_size=rng.randint(8, 300),
        hidden_size=hidden,
        intermediate_size=width(200),
        kda=kda,
        mla=MLAConfig(
            num_attention_heads=rng.randint(1, 5),
            q_lora_rank=width(64),
            kv_lora_rank=width(160),
            qk_nope_head_dim=width(96),
            qk_rope_head_dim=width(64),
            v_head_dim=width(96),
            mla_use_output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=experts,
            num_experts_per_token=rng.randint(1, experts),
            moe_intermediate_size=width(96),
            num_shared_experts=1,
            routed_expert_hidden_size=latent,
            latent_moe_use_norm=latent is not None,
        ),
        hidden_act=rng.choice(("situ", "silu")),
        activation_situ_linear_beta=rng.choice((25.0, None)),
        attn_res_block_size=rng.randint(1, 12),
    )
