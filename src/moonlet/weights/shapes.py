"""Which tensors an architecture has on disk: parameter, shape and dtype (model.md section 2.2).

Written from the published table, independently of the modules in `moonlet.model`, so that each
checks the other when a checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moonlet.core.config import ModelConfig
from moonlet.core.hf_config import CheckpointConfig
from moonlet.core.hf_quantization import MXFP4_GROUP_SIZE
from moonlet.core.storage import Storage, require_packable, storage_of
from moonlet.core.vision_sizes import vision_sizes
from moonlet.weights.names import PACKED, PLAIN, SCALE

__all__ = ["TensorSpec", "expected_tensors", "text_tensors", "vision_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter as it stands on disk.

    Attributes:
        parameter: Parameter path in the model, or a vision tensor's published name.
        shape: Published shape; of one expert for a stacked parameter.
        dtype: Published dtype, a safetensors name.
        accepted: Dtypes that load without loss.
        num_experts: Length of the stacked axis, or None.
        packed: An expert is published as an MXFP4 pair (a plain matrix is accepted as well).
        may_be_packed: An MXFP4 pair is accepted in place of the plain matrix: the map of a linear
            layer, where experts are packed (model.md section 2.5: the tensors that exist decide).
        layer: 0-based layer, or None.
        min_numel: For ``A_log``: the least number of elements, any shape of one axis or
            ``[1, 1, n, 1]``; None demands ``shape``.
        is_loaded: False for tensors that are verified but have no module yet.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    accepted: frozenset[str]
    num_experts: int | None = None
    packed: bool = False
    may_be_packed: bool = False
    layer: int | None = None
    min_numel: int | None = None
    is_loaded: bool = True

    def part_shape(self, part: str) -> tuple[int, ...]:
        """Shape of one part: the matrix, its packed bytes or its scales."""
        if part == PLAIN:
            return self.shape
        *rows, inputs = self.shape
        return (*rows, inputs // 2 if part == PACKED else inputs // MXFP4_GROUP_SIZE)

    def part_dtype(self, part: str) -> str:
        """Published dtype of one part."""
        return self.dtype if part == PLAIN else "U8"

    def takes(self, part: str) -> bool:
        """Whether a tensor may be this part."""
        return part == PLAIN or self.packed or self.may_be_packed

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are published."""
        return (PACKED, SCALE) if self.packed else (PLAIN,)

    def accepts_shape(self, part: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of ``shape`` can fill the part."""
        if self.min_numel is None or part != PLAIN:
            return shape == self.part_shape(part)
        if len(shape) == 1:
            return shape[0] >= self.min_numel
        return len(shape) == 4 and shape == (1, 1, shape[2], 1) and shape[2] >= self.min_numel

    def accepts_dtype(self, part: str, dtype: str) -> bool:
        """Whether a tensor of ``dtype`` can fill the part."""
        return dtype in self.accepted if part == PLAIN else dtype == "U8"


def expected_tensors(config: CheckpointConfig) -> dict[str, TensorSpec]:
    """Return every tensor that the configuration demands, by parameter.

    Raises:
        ConfigError: Packed experts do not divide into groups, or the vision tower is not K3's.
    """
    specs = [*text_tensors(config.text, storage_of(config)), *vision_tensors(config.vision)]
    return {spec.parameter: spec for spec in specs}


def vision_tensors(vision: Mapping[str, object] | None) -> Iterator[TensorSpec]:
    """Yield the tower's and projector's tensors; none without a ``vision_config``."""
    if vision is None:
        return
    sizes = vision_sizes(vision)
    for shapes in (sizes.projector_shapes(), sizes.tower_shapes()):
        for name, shape in shapes.items():
            yield TensorSpec(
                parameter=name,
                shape=shape,
                dtype="BF16",
                accepted=frozenset({"BF16"}),
                is_loaded=False,
            )


def text_tensors(config: ModelConfig, storage: Storage) -> Iterator[TensorSpec]:
    """Yield the text model's tensors in layer order, tables last."""
    hidden, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    build = _Builder(storage)
    for layer in range(config.num_hidden_layers):
        build.layer = layer
        yield from _layer_tensors(config, storage, build, layer)
    build.layer = None
    yield build.plain("embed_tokens.weight", *table)
    yield build.plain("norm.weight", hidden)
    yield build.plain("lm_head.weight", *table)
    if config.attn_res_block_size is not None:
        yield build.plain("output_attn_res_norm.weight", hidden)
        yield build.plain("output_attn_res_proj.weight", 1, hidden)


class _Builder:
    """Makes specs of one layer; holds the dtypes and the accepted alternatives."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.layer: int | None = None

    def _spec(self, name: str, shape: tuple[int, ...], dtype: str, is_small: bool) -> TensorSpec:
        path = name if self.layer is None else f"layers.{self.layer}.{name}"
        accepted = {dtype}
        if is_small and not self.storage.is_wrapped:
            # bare checkpoints differ in these; K3's are proven by its byte total
            accepted |= {"BF16", "F32"}
        # the projections of AttnRes have one output and are no layers of their own
        is_linear = name.endswith("_proj.weight") and shape[0] > 1
        return TensorSpec(
            parameter=path,
            shape=shape,
            dtype=dtype,
            accepted=frozenset(accepted),
            may_be_packed=is_linear
            and self.storage.packs_experts
            and shape[-1] % MXFP4_GROUP_SIZE == 0,
            layer=self.layer,
        )

    def plain(self, name: str, *shape: int) -> TensorSpec:
        return self._spec(name, shape, self.storage.plain, is_small=False)

    def kda_small(self, name: str, *shape: int) -> TensorSpec:
        return self._spec(name, shape, self.storage.kda_small, is_small=True)

    def gate(self, name: str, *shape: int) -> TensorSpec:
        return self._spec(name, shape, self.storage.gate, is_small=True)


def _layer_tensors(
    config: ModelConfig, storage: Storage, build: _Builder, layer: int
) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    yield build.plain("input_layernorm.weight", hidden)
    yield build.plain("post_attention_layernorm.weight", hidden)
    if config.attn_res_block_size is not None:
        for sublayer in ("self_attention", "mlp"):
            yield build.plain(f"{sublayer}_res_norm.weight", hidden)
            yield build.plain(f"{sublayer}_res_proj.weight", 1, hidden)
    if config.is_kda(layer):
        yield from _kda_tensors(config, storage, build)
    else:
        yield from _mla_tensors(config, build)
    if config.is_moe(layer):
        yield from _moe_tensors(config, storage, build, layer)
    else:
        yield from _mlp_tensors(build, "ffn", hidden, config.intermediate_size)


def _kda_tensors(config: ModelConfig, storage: Storage, build: _Builder) -> Iterator[TensorSpec]:
    kda, hidden = config.kda, config.hidden_size
    width, dim = kda.projection_size, kda.head_dim
    for letter in "qkv":
        yield build.plain(f"self_attn.{letter}_proj.weight", width, hidden)
        yield build.kda_small(
            f"self_attn.{letter}_conv1d.weight", width, 1, kda.short_conv_kernel_size
        )
    yield build.plain("self_attn.f_a_proj.weight", dim, hidden)
    yield build.plain("self_attn.f_b_proj.weight", width, dim)
    yield build.gate("self_attn.dt_bias", width)
    a_log = build.gate("self_attn.A_log", *storage.a_log_shape(kda))
    yield replace(a_log, min_numel=kda.num_heads)
    yield build.plain("self_attn.b_proj.weight", kda.num_heads, hidden)
    if kda.use_full_rank_gate:
        yield build.plain("self_attn.g_proj.weight", width, hidden)
    else:
        yield build.plain("self_attn.g_a_proj.weight", dim, hidden)
        yield build.plain("self_attn.g_b_proj.weight", width, dim)
    yield build.kda_small("self_attn.o_norm.weight", dim)
    yield build.plain("self_attn.o_proj.weight", hidden, width)


def _mla_tensors(config: ModelConfig, build: _Builder) -> Iterator[TensorSpec]:
    mla, hidden = config.mla, config.hidden_size
    heads = mla.num_attention_heads
    queries, values = heads * mla.qk_head_dim, heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        yield build.plain("self_attn.q_proj.weight", queries, hidden)
    else:
        yield build.plain("self_attn.q_a_proj.weight", mla.q_lora_rank, hidden)
        yield build.plain("self_attn.q_a_layernorm.weight", mla.q_lora_rank)
        yield build.plain("self_attn.q_b_proj.weight", queries, mla.q_lora_rank)
    yield build.plain("self_attn.kv_a_proj_with_mqa.weight", mla.cache_size, hidden)
    yield build.plain("self_attn.kv_a_layernorm.weight", mla.kv_lora_rank)
    expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield build.plain("self_attn.kv_b_proj.weight", expanded, mla.kv_lora_rank)
    if mla.mla_use_output_gate:
        yield build.plain("self_attn.g_proj.weight", values, hidden)
    yield build.plain("self_attn.o_proj.weight", hidden, values)


def _mlp_tensors(build: _Builder, owner: str, hidden: int, width: int) -> Iterator[TensorSpec]:
    yield build.plain(f"{owner}.gate_proj.weight", width, hidden)
    yield build.plain(f"{owner}.up_proj.weight", width, hidden)
    yield build.plain(f"{owner}.down_proj.weight", hidden, width)


def _moe_tensors(
    config: ModelConfig, storage: Storage, build: _Builder, layer: int
) -> Iterator[TensorSpec]:
    moe, hidden = config.moe, config.hidden_size
    if moe is None:
        return
    yield build.plain("ffn.gate.weight", moe.num_experts, hidden)
    yield build.gate("ffn.gate.e_score_correction_bias", moe.num_experts)
    latent = moe.routed_expert_hidden_size
    if latent is not None:
        yield build.plain("ffn.routed_expert_down_proj.weight", latent, hidden)
        if moe.latent_moe_use_norm:
            yield build.plain("ffn.routed_expert_norm.weight", latent)
        yield build.plain("ffn.routed_expert_up_proj.weight", hidden, latent)
    if moe.num_shared_experts:
        yield from _mlp_tensors(build, "ffn.shared_experts", hidden, moe.shared_intermediate_size)
    if storage.packs_experts:
        require_packable(config)
    inputs, width = config.expert_input_size, moe.moe_intermediate_size
    for matrix, shape in (
        ("w1", (width, inputs)),
        ("w2", (inputs, width)),
        ("w3", (width, inputs)),
    ):
        yield TensorSpec(
            parameter=f"layers.{layer}.ffn.experts.{matrix}",
            shape=shape,
            dtype=storage.plain,
            accepted=frozenset({storage.plain}),
            num_experts=moe.num_experts,
            packed=storage.packs_experts,
            layer=layer,
        )
