"""Published configurations, typed from the tables of their model cards; shared by tests."""

from typing import Any

from moonlet.core.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig


def quantization() -> dict[str, Any]:
    """The quantization object of K3."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def k3() -> dict[str, Any]:
    """Kimi K3, the wrapper object."""
    mla = [*range(4, 93, 4), 93]
    text = {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "kda_layers": [i for i in range(1, 94) if i not in mla],
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 3072,
        "moe_layer_freq": 1,
        "num_attention_heads": 96,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_key_value_heads": 96,
        "num_shared_experts": 2,
        "pad_token_id": 163839,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": quantization(),
        "rms_norm_eps": 1e-5,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }
    return {
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k3",
        "pad_token_id": 163839,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": vision(),
    }


def vision() -> dict[str, Any]:
    """The vision tower and projector of K3."""
    return {
        "attn_bias": False,
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": 1024,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "qkv_hidden_size": 1536,
        "text_hidden_size": 7168,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": 27,
    }


def kimi_linear_48b() -> dict[str, Any]:
    """Kimi-Linear-48B-A3B, a bare text object."""
    mla = [4, 8, 12, 16, 20, 24, 27]
    return {
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "head_dim": 128,
            "kda_layers": [i for i in range(1, 28) if i not in mla],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": 163839,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }


def small_config() -> ModelConfig:
    """A K3-family model whose sizes are all different."""
    return ModelConfig(
        vocab_size=320,
        hidden_size=40,
        num_hidden_layers=7,
        intermediate_size=72,
        kda_layers=(0, 1, 2, 4, 5),
        moe_layers=(2, 3, 4, 5, 6),
        kda=KDAConfig(
            num_heads=3,
            head_dim=16,
            short_conv_kernel_size=4,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
        ),
        mla=MLAConfig(
            num_attention_heads=5,
            q_lora_rank=24,
            kv_lora_rank=28,
            qk_nope_head_dim=12,
            qk_rope_head_dim=6,
            v_head_dim=10,
            mla_use_output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=8,
            num_experts_per_token=2,
            moe_intermediate_size=64,
            num_shared_experts=2,
            routed_expert_hidden_size=32,
            latent_moe_use_norm=True,
        ),
        hidden_act="situ",
        attn_res_block_size=3,
        rms_norm_eps=1e-5,
    )
