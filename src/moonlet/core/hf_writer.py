"""Writing the K3 wrapper object from a `ModelConfig` (inverse of `core.hf_config`)."""

from __future__ import annotations

from typing import Any

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.core.hf_quantization import published_quantization

__all__ = ["published_object"]

# <|media_pad|> sits at this offset from the first reserved id (chat-protocol.md section 2.2)
MEDIA_PAD_OFFSET = 21


def published_object(config: ModelConfig, *, quantized: bool) -> dict[str, Any]:
    """Return the wrapper ``config.json`` of a text model in the published schema."""
    text = _text_object(config)
    if quantized:
        text["quantization_config"] = published_quantization()
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "bos_token_id": config.bos_token_id,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": config.bos_token_id + MEDIA_PAD_OFFSET,
        "model_type": "kimi_k3",
        "pad_token_id": config.pad_token_id,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": None,
    }


def _text_object(config: ModelConfig) -> dict[str, Any]:
    linear: dict[str, Any] = {
        "full_attn_layers": [i + 1 for i in config.mla_layers],
        "head_dim": config.kda.head_dim,
        "kda_layers": [i + 1 for i in config.kda_layers],
        "num_heads": config.kda.num_heads,
        "short_conv_kernel_size": config.kda.short_conv_kernel_size,
        "use_full_rank_gate": config.kda.use_full_rank_gate,
    }
    if config.kda.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.kda.gate_lower_bound
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": config.bos_token_id,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "kv_lora_rank": config.mla.kv_lora_rank,
        "linear_attn_config": linear,
        "max_position_embeddings": config.max_position_embeddings,
        "mla_use_nope": True,
        "mla_use_output_gate": config.mla.mla_use_output_gate,
        "model_type": "kimi_linear",
        "num_attention_heads": config.mla.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.mla.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": config.pad_token_id,
        "q_lora_rank": config.mla.q_lora_rank,
        "qk_nope_head_dim": config.mla.qk_nope_head_dim,
        "qk_rope_head_dim": config.mla.qk_rope_head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "v_head_dim": config.mla.v_head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.hidden_act == "situ":
        text["activation_situ_beta"] = config.activation_situ_beta
        if config.activation_situ_linear_beta is not None:
            text["activation_situ_linear_beta"] = config.activation_situ_linear_beta
    if config.attn_res_block_size is not None:
        text["attn_res_block_size"] = config.attn_res_block_size
    text.update(_moe_object(config))
    return dict(sorted(text.items()))


def _moe_object(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    first = config.moe_layers[0] if config.moe_layers else config.num_hidden_layers
    if config.moe_layers != tuple(range(first, config.num_hidden_layers)):
        raise ConfigError(
            f"moe_layers {list(config.moe_layers)} cannot be published: "
            "first_k_dense_replace describes one dense prefix only"
        )
    fields: dict[str, Any] = {
        "first_k_dense_replace": first,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "moe_layer_freq": 1,
        "moe_renormalize": moe.moe_renormalize,
        "moe_router_activation_func": moe.moe_router_activation_func,
        "num_expert_group": moe.num_expert_group,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "topk_group": moe.topk_group,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
    }
    if moe.routed_expert_hidden_size is not None:
        fields["latent_moe_use_norm"] = moe.latent_moe_use_norm
        fields["routed_expert_hidden_size"] = moe.routed_expert_hidden_size
    return fields
