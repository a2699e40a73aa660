"""Architecture configuration: frozen, checked once, never changed afterwards.

Field names are those of the published ``config.json``; `core.hf_config` reads and writes that
file. Layer lists are 0-based here, 1-based in the file (model.md section 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from moonlet.core.errors import ConfigError

__all__ = ["KDAConfig", "MLAConfig", "MoEConfig", "ModelConfig"]

HIDDEN_ACTS = ("situ", "silu")
ROUTER_ACTIVATIONS = ("sigmoid", "softmax")


def _require_positive(owner: str, **values: int | float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{owner}.{name} is {value}; it must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention (``linear_attn_config``).

    Attributes:
        num_heads: Heads H; keys and values have the same count.
        head_dim: Key and value width per head.
        short_conv_kernel_size: Taps of the depthwise causal convolution.
        gate_lower_bound: Negative bound of the sigmoid gate (K3: -5), or None for the softplus
            gate of Kimi-Linear.
        use_full_rank_gate: One ``g_proj`` (K3) instead of ``g_a_proj``/``g_b_proj``.
    """

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        _require_positive(
            "linear_attn_config",
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            short_conv_kernel_size=self.short_conv_kernel_size,
        )
        if self.gate_lower_bound is not None and self.gate_lower_bound >= 0:
            raise ConfigError(
                f"linear_attn_config.gate_lower_bound is {self.gate_lower_bound}; "
                "it must be negative or absent"
            )

    @property
    def projection_size(self) -> int:
        """Width of each of q, k, v: heads times head_dim."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Gated multi-head latent attention without positional encoding.

    Attributes:
        q_lora_rank: Width of the query latent, or None for a direct ``q_proj``.
        kv_lora_rank: Width of the cached latent.
        qk_rope_head_dim: Width of the key part shared by all heads (never rotated).
        mla_use_output_gate: Sigmoid output gate (K3).
    """

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        _require_positive(
            "mla",
            num_attention_heads=self.num_attention_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key: the nope part and the shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_size(self) -> int:
        """Cached values per token and layer: latent and shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Stable LatentMoE (K3) or plain MoE (Kimi-Linear).

    Attributes:
        routed_expert_hidden_size: Latent width, or None when experts read the hidden state.
        num_shared_experts: Count fused into one MLP of ``n * moe_intermediate_size``.
    """

    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int = 0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    num_expert_group: int = 1
    topk_group: int = 1

    def __post_init__(self) -> None:
        """Check ranges and the group arithmetic."""
        _require_positive(
            "moe",
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            moe_intermediate_size=self.moe_intermediate_size,
            routed_expert_hidden_size=self.routed_expert_hidden_size,
            num_expert_group=self.num_expert_group,
            topk_group=self.topk_group,
        )
        if self.num_shared_experts < 0:
            raise ConfigError(f"num_shared_experts is {self.num_shared_experts}; at least 0")
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_token is {self.num_experts_per_token}, more than "
                f"num_experts {self.num_experts}"
            )
        if self.moe_router_activation_func not in ROUTER_ACTIVATIONS:
            raise ConfigError(
                f"moe_router_activation_func is {self.moe_router_activation_func!r}; "
                f"choose one of {', '.join(ROUTER_ACTIVATIONS)}"
            )
        if self.num_experts % self.num_expert_group:
            raise ConfigError(
                f"num_expert_group {self.num_expert_group} does not divide "
                f"num_experts {self.num_experts}"
            )
        if self.latent_moe_use_norm and self.routed_expert_hidden_size is None:
            raise ConfigError("latent_moe_use_norm needs routed_expert_hidden_size")

    @property
    def expert_input_size(self) -> int | None:
        """Latent width, or None for the model's hidden size."""
        return self.routed_expert_hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The text model: everything the forward pass depends on.

    Attributes:
        kda_layers: 0-based indices of KDA layers; every other layer is Gated MLA.
        moe_layers: 0-based indices of MoE layers; every other layer has the dense FFN.
        attn_res_block_size: AttnRes block length, or None for a plain residual stream.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    kda_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig | None = None
    hidden_act: str = "silu"
    activation_situ_beta: float = 1.0
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096
    attn_res_block_size: int | None = None
    bos_token_id: int = 1
    eos_token_id: int = 2
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        """Check every field that the forward pass relies on."""
        _require_positive(
            "config",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            intermediate_size=self.intermediate_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            attn_res_block_size=self.attn_res_block_size,
            activation_situ_beta=self.activation_situ_beta,
            activation_situ_linear_beta=self.activation_situ_linear_beta,
        )
        if self.hidden_act not in HIDDEN_ACTS:
            raise ConfigError(
                f"hidden_act is {self.hidden_act!r}; choose one of {', '.join(HIDDEN_ACTS)}"
            )
        for name, layers in (("kda_layers", self.kda_layers), ("moe_layers", self.moe_layers)):
            if list(layers) != sorted(set(layers)):
                raise ConfigError(f"{name} must be sorted without repeats, got {list(layers)}")
            if layers and not 0 <= layers[0] <= layers[-1] < self.num_hidden_layers:
                raise ConfigError(
                    f"{name} {list(layers)} reaches outside the {self.num_hidden_layers} layers"
                )
        if self.moe_layers and self.moe is None:
            raise ConfigError("moe_layers is not empty but no expert configuration is given")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be below vocab_size "
                    f"{self.vocab_size}"
                )

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based ``layer`` is KDA (else Gated MLA)."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based ``layer`` has routed experts (else the dense FFN)."""
        return layer in self.moe_layers

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of Gated MLA layers."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.kda_layers)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """0-based indices of layers with the dense FFN."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.moe_layers)

    @property
    def expert_input_size(self) -> int:
        """Input width of a routed expert: the latent width or the hidden size."""
        latent = self.moe.routed_expert_hidden_size if self.moe is not None else None
        return self.hidden_size if latent is None else latent
