"""Exact parameter, byte and state counts of a text model (model.md section 4).

Every number is an integer derived from the configuration; loader, engine and planner read them
here so that they cannot disagree. Parameters are logical elements (a packed expert counts its
4-bit elements); bytes are those of the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonlet.core.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moonlet.core.hf_config import CheckpointConfig
from moonlet.core.hf_quantization import MXFP4_GROUP_SIZE
from moonlet.core.storage import K3_STORAGE, Storage, require_packable, storage_of
from moonlet.core.vision_sizes import vision_sizes

__all__ = ["Budget", "Component", "StateBudget", "budget_of", "derive_budget"]

# the recurrent state and its update are always float32
_RECURRENT_BYTES = 4
# convolution tail, MLA cache and AttnRes vectors at the published model dtype, bf16
_CACHE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Component:
    """One line of the budget: ``count`` equal parts.

    Attributes:
        name: ``routed_experts``, ``kda_layers``, ...
        count: How many parts (layers, experts, tables).
        parameters_each: Elements of one part.
        bytes_each: Published bytes of one part.
    """

    name: str
    count: int
    parameters_each: int
    bytes_each: int

    @property
    def parameters(self) -> int:
        """Elements of all parts."""
        return self.count * self.parameters_each

    @property
    def num_bytes(self) -> int:
        """Published bytes of all parts."""
        return self.count * self.bytes_each


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBudget:
    """What one sequence keeps between tokens, in bytes.

    Attributes:
        recurrent_bytes_per_layer: One KDA layer's matrix state, float32.
        conv_bytes_per_layer: One KDA layer's last raw q, k, v projections, bf16.
        mla_bytes_per_layer_token: One MLA layer's latent and shared key part, bf16.
        attn_res_bytes_per_token: Largest AttnRes scratch of a token in flight, bf16; 0 without
            AttnRes. Nothing of it is kept.
    """

    num_kda_layers: int
    num_mla_layers: int
    recurrent_bytes_per_layer: int
    conv_bytes_per_layer: int
    mla_bytes_per_layer_token: int
    attn_res_bytes_per_token: int

    @property
    def recurrent_bytes(self) -> int:
        """Matrix states of all KDA layers of one sequence."""
        return self.num_kda_layers * self.recurrent_bytes_per_layer

    @property
    def conv_bytes(self) -> int:
        """Convolution tails of all KDA layers of one sequence."""
        return self.num_kda_layers * self.conv_bytes_per_layer

    @property
    def bytes_per_sequence(self) -> int:
        """What a sequence keeps whatever its length."""
        return self.recurrent_bytes + self.conv_bytes

    @property
    def mla_bytes_per_token(self) -> int:
        """What a sequence keeps more per token: MLA layers only."""
        return self.num_mla_layers * self.mla_bytes_per_layer_token

    def sequence_bytes(self, num_tokens: int) -> int:
        """All state of one sequence of ``num_tokens`` tokens."""
        return self.bytes_per_sequence + num_tokens * self.mla_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Counts of one model.

    Attributes:
        text: Components of the text model.
        vision: ``mm_projector`` and ``vision_tower``, or empty.
        state: Per-sequence state.
    """

    text: tuple[Component, ...]
    vision: tuple[Component, ...]
    state: StateBudget
    num_moe_layers: int
    num_experts: int
    num_experts_per_token: int
    embedding_row_bytes: int

    def component(self, name: str) -> Component:
        """Return the component called ``name``."""
        return next(part for part in (*self.text, *self.vision) if part.name == name)

    @property
    def text_parameters(self) -> int:
        """Parameters of the text model."""
        return sum(part.parameters for part in self.text)

    @property
    def text_bytes(self) -> int:
        """Published bytes of the text model."""
        return sum(part.num_bytes for part in self.text)

    @property
    def total_parameters(self) -> int:
        """Parameters with vision."""
        return self.text_parameters + sum(part.parameters for part in self.vision)

    @property
    def total_bytes(self) -> int:
        """Published bytes with vision: the index's ``metadata.total_size``."""
        return self.text_bytes + sum(part.num_bytes for part in self.vision)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through, the embedding table included."""
        routed = self.component("routed_experts")
        chosen = self.num_moe_layers * self.num_experts_per_token
        return self.text_parameters - routed.parameters + chosen * routed.parameters_each

    @property
    def active_parameters_without_embedding(self) -> int:
        """Active parameters less the input embedding table (the report's count)."""
        return self.active_parameters - self.component("embed_tokens").parameters

    @property
    def active_parameters_without_tables(self) -> int:
        """Active parameters less the input embedding and the output head."""
        return self.active_parameters_without_embedding - self.component("lm_head").parameters

    @property
    def weight_bytes_per_token(self) -> int:
        """Weight bytes that decoding one token of one sequence reads."""
        return self.weight_bytes_per_step(1, float(self.num_experts_per_token))

    def weight_bytes_per_step(self, num_tokens: int, distinct_experts: float) -> int:
        """Weight bytes of one decode step of a batch.

        Args:
            num_tokens: Tokens of the step; each reads its own embedding row.
            distinct_experts: Experts touched per MoE layer (see `expected_distinct_experts`).
        """
        routed = self.component("routed_experts")
        fixed = self.text_bytes - routed.num_bytes - self.component("embed_tokens").num_bytes
        experts = round(self.num_moe_layers * routed.bytes_each * distinct_experts)
        return fixed + num_tokens * self.embedding_row_bytes + experts

    def expected_distinct_experts(self, num_tokens: int) -> float:
        """Experts touched per MoE layer by a batch under uniform routing (real routing skews)."""
        if not self.num_experts:
            return 0.0
        untouched = (1 - self.num_experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - untouched)


def budget_of(config: CheckpointConfig) -> Budget:
    """Derive the budget of a published configuration in the layout that it declares."""
    return derive_budget(config.text, storage=storage_of(config), vision=config.vision)


def derive_budget(
    config: ModelConfig,
    *,
    storage: Storage = K3_STORAGE,
    vision: Mapping[str, Any] | None = None,
) -> Budget:
    """Derive every count from a configuration.

    Args:
        config: The text model.
        storage: On-disk dtypes, which decide bytes and the padding of ``A_log``.
        vision: Published ``vision_config``, or None for a text-only model.

    Raises:
        ConfigError: Packed experts do not divide into groups, or the vision tower is not K3's.
    """
    moe = config.moe if config.moe_layers else None
    return Budget(
        text=_text_components(config, storage),
        vision=_vision_components(vision),
        state=_state_budget(config),
        num_moe_layers=len(config.moe_layers),
        num_experts=moe.num_experts if moe else 0,
        num_experts_per_token=moe.num_experts_per_token if moe else 0,
        embedding_row_bytes=config.hidden_size * storage.plain_bytes,
    )


def _text_components(config: ModelConfig, storage: Storage) -> tuple[Component, ...]:
    plain = storage.plain_bytes
    num_layers, hidden = config.num_hidden_layers, config.hidden_size
    table = config.vocab_size * hidden
    dense = 3 * hidden * config.intermediate_size
    attn_res = (4 * num_layers + 2) * hidden if config.attn_res_block_size is not None else 0
    norms = (2 * num_layers + 1) * hidden
    mla = _mla_parameters(config.mla, hidden)
    return (
        *_moe_components(config, storage),
        _kda_component(config.kda, hidden, len(config.kda_layers), storage),
        Component("mla_layers", len(config.mla_layers), mla, mla * plain),
        Component("dense_ffn", len(config.dense_layers), dense, dense * plain),
        Component("attn_res", 1, attn_res, attn_res * plain),
        Component("layer_norms", 1, norms, norms * plain),
        Component("embed_tokens", 1, table, table * plain),
        Component("lm_head", 1, table, table * plain),
    )


def _kda_component(kda: KDAConfig, hidden: int, count: int, storage: Storage) -> Component:
    width, dim = kda.projection_size, kda.head_dim
    low_rank = dim * hidden + width * dim
    output_gate = width * hidden if kda.use_full_rank_gate else low_rank
    # q, k, v, o projections; decay and output gates; one beta row per head
    plain = 4 * width * hidden + low_rank + output_gate + kda.num_heads * hidden
    small = 3 * width * kda.short_conv_kernel_size + dim
    padded_heads = max(kda.num_heads, dim) if storage.is_wrapped else kda.num_heads
    gate = width + padded_heads
    num_bytes = (
        plain * storage.plain_bytes + small * storage.kda_small_bytes + gate * storage.gate_bytes
    )
    return Component("kda_layers", count, plain + small + gate, num_bytes)


def _mla_parameters(mla: MLAConfig, hidden: int) -> int:
    heads = mla.num_attention_heads
    queries, values = heads * mla.qk_head_dim, heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        query = queries * hidden
    else:
        query = mla.q_lora_rank * (hidden + 1 + queries)
    key_value = (
        mla.cache_size * hidden
        + mla.kv_lora_rank
        + heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
    )
    gate = values * hidden if mla.mla_use_output_gate else 0
    return query + key_value + gate + hidden * values


def _moe_components(config: ModelConfig, storage: Storage) -> tuple[Component, ...]:
    moe, hidden, plain = config.moe, config.hidden_size, storage.plain_bytes
    layers = len(config.moe_layers)
    if moe is None or not layers:
        names = ("routed_experts", "shared_experts", "latent_projections", "routers")
        return tuple(Component(name, 0, 0, 0) for name in names)
    expert = 3 * config.expert_input_size * moe.moe_intermediate_size
    expert_bytes = expert * plain
    if storage.packs_experts:
        require_packable(config)
        # two elements per byte and one scale byte per group
        expert_bytes = expert // 2 + expert // MXFP4_GROUP_SIZE
    shared = 3 * hidden * moe.shared_intermediate_size
    latent = _latent_parameters(moe, hidden)
    router = moe.num_experts * hidden
    return (
        Component("routed_experts", layers * moe.num_experts, expert, expert_bytes),
        Component("shared_experts", layers, shared, shared * plain),
        Component("latent_projections", layers, latent, latent * plain),
        Component(
            "routers",
            layers,
            router + moe.num_experts,
            router * plain + moe.num_experts * storage.gate_bytes,
        ),
    )


def _latent_parameters(moe: MoEConfig, hidden: int) -> int:
    latent = moe.routed_expert_hidden_size
    if latent is None:
        return 0
    return 2 * latent * hidden + (latent if moe.latent_moe_use_norm else 0)


def _vision_components(vision: Mapping[str, Any] | None) -> tuple[Component, ...]:
    if vision is None:
        return ()
    sizes = vision_sizes(vision)
    projector, tower = sizes.projector_parameters, sizes.tower_parameters
    # every vision tensor is published as bf16
    return (
        Component("mm_projector", 1, projector, 2 * projector),
        Component("vision_tower", 1, tower, 2 * tower),
    )


def _state_budget(config: ModelConfig) -> StateBudget:
    kda = config.kda
    scratch = 0
    if config.attn_res_block_size is not None:
        # finished blocks plus the running prefix sum
        num_blocks = -(-config.num_hidden_layers // config.attn_res_block_size)
        scratch = (num_blocks + 1) * config.hidden_size * _CACHE_BYTES
    return StateBudget(
        num_kda_layers=len(config.kda_layers),
        num_mla_layers=len(config.mla_layers),
        recurrent_bytes_per_layer=kda.num_heads * kda.head_dim**2 * _RECURRENT_BYTES,
        conv_bytes_per_layer=(
            3 * kda.projection_size * (kda.short_conv_kernel_size - 1) * _CACHE_BYTES
        ),
        mla_bytes_per_layer_token=config.mla.cache_size * _CACHE_BYTES,
        attn_res_bytes_per_token=scratch,
    )
