import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from moonlet.core.budget import Budget, budget_of, derive_budget
from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import parse_config, read_config
from moonlet.core.storage import K3_STORAGE, KIMI_LINEAR_STORAGE, Storage
from moonlet.weights.names import PACKED, SCALE
from moonlet.weights.shapes import text_tensors
from tests.core.published import k3, kimi_linear_48b, small_config, vision
from tests.golden_data import count_vectors, golden_dir, require

DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


def test_k3_equals_the_published_totals_to_the_byte() -> None:
    budget = budget_of(parse_config(k3()))
    parameters = {part.name: part.parameters for part in (*budget.text, *budget.vision)}
    num_bytes = {part.name: part.num_bytes for part in (*budget.text, *budget.vision)}
    assert parameters == {
        "routed_experts": 2_722_740_830_208,
        "shared_experts": 12_155_092_992,
        "latent_projections": 4_727_310_336,
        "routers": 590_955_008,
        "kda_layers": 30_618_088_704,
        "mla_layers": 5_572_706_304,
        "dense_ffn": 726_663_168,
        "attn_res": 2_680_832,
        "layer_norms": 1_340_416,
        "embed_tokens": 1_174_405_120,
        "lm_head": 1_174_405_120,
        "mm_projector": 46_144_512,
        "vision_tower": 401_214_464,
    }
    assert num_bytes["routed_experts"] == 1_446_456_066_048
    assert num_bytes["kda_layers"] == 61_258_257_408
    assert num_bytes["routers"] == 1_182_074_880
    assert budget.component("routed_experts").bytes_each == 17_547_264
    assert budget.text_parameters == 2_779_484_478_208
    assert budget.text_bytes == 1_559_965_606_912
    assert budget.total_parameters == 2_779_931_837_184
    assert budget.total_bytes == 1_560_860_324_864
    assert budget.active_parameters == 105_364_019_968
    assert budget.active_parameters_without_embedding == 104_189_614_848
    assert budget.active_parameters_without_tables == 103_015_209_728
    assert budget.weight_bytes_per_token == 136_990_317_568
    assert budget.expected_distinct_experts(1) == pytest.approx(16)
    assert budget.expected_distinct_experts(100_000) == pytest.approx(896)


def test_k3_state_equals_the_published_sizes() -> None:
    state = budget_of(parse_config(k3())).state
    assert state.recurrent_bytes_per_layer == 6_291_456
    assert state.recurrent_bytes == 434_110_464
    assert state.conv_bytes_per_layer == 221_184
    assert state.conv_bytes == 15_261_696
    assert state.bytes_per_sequence == 449_372_160
    assert state.mla_bytes_per_token == 27_648
    assert state.sequence_bytes(1_048_576) - state.bytes_per_sequence == 28_991_029_248
    assert state.attn_res_bytes_per_token == 129_024


def test_kimi_linear_48b_equals_the_published_totals() -> None:
    config = parse_config(kimi_linear_48b())
    budget = budget_of(config)
    parameters = {part.name: part.parameters for part in budget.text if part.parameters}
    assert parameters == {
        "routed_experts": 47_110_422_528,
        "shared_experts": 184_025_088,
        "routers": 15_342_080,
        "kda_layers": 790_285_440,
        "mla_layers": 203_804_160,
        "dense_ffn": 63_700_992,
        "layer_norms": 126_720,
        "embed_tokens": 377_487_360,
        "lm_head": 377_487_360,
    }
    assert budget.component("kda_layers").parameters_each == 39_514_272
    assert budget.component("mla_layers").parameters_each == 29_114_880
    assert budget.total_parameters == 49_122_681_728
    assert budget.total_bytes == 98_245_541_888
    assert budget.active_parameters == 3_484_459_904
    assert budget.active_parameters_without_embedding == 3_106_972_544
    all_bf16 = derive_budget(config.text, storage=replace(KIMI_LINEAR_STORAGE, gate="BF16"))
    assert all_bf16.total_bytes == 98_245_363_456
    assert all_bf16.weight_bytes_per_token == 6_213_945_088 + 4_608
    assert budget.state.recurrent_bytes_per_layer == 2_097_152
    assert budget.state.recurrent_bytes == 41_943_040
    assert budget.state.conv_bytes_per_layer == 73_728
    assert budget.state.conv_bytes == 1_474_560
    assert budget.state.mla_bytes_per_token == 8_064
    assert budget.state.attn_res_bytes_per_token == 0


@pytest.mark.parametrize("name", ["tiny_k3", "tiny_kimi_linear"])
def test_golden_checkpoints_weigh_what_their_index_says(name: str) -> None:
    folder = require(golden_dir("model") / name / "checkpoint")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert budget_of(read_config(folder)).total_bytes == index["metadata"]["total_size"]
    count_vectors(1)


def component_of(config: ModelConfig, parameter: str) -> str:
    """The budget line that a tensor belongs to, from its name alone."""
    rules = (
        ("ffn.experts.", "routed_experts"),
        ("ffn.shared_experts.", "shared_experts"),
        ("ffn.routed_expert_", "latent_projections"),
        ("ffn.gate.", "routers"),
        ("ffn.", "dense_ffn"),
        ("_res_", "attn_res"),
        ("layernorm", "layer_norms"),
        ("embed_tokens", "embed_tokens"),
        ("lm_head", "lm_head"),
        ("norm.weight", "layer_norms"),
    )
    if ".self_attn." in parameter:
        layer = int(parameter.split(".")[1])
        return "kda_layers" if config.is_kda(layer) else "mla_layers"
    return next(component for part, component in rules if part in parameter)


def counted(config: ModelConfig, storage: Storage) -> dict[str, tuple[int, int]]:
    """Parameters and bytes per component, added up tensor by tensor."""
    totals: dict[str, tuple[int, int]] = {}
    for spec in text_tensors(config, storage):
        copies = spec.num_experts or 1
        parameters = copies * math.prod(spec.shape)
        num_bytes = parameters * DTYPE_BYTES[spec.dtype]
        if spec.packed:
            num_bytes = copies * sum(math.prod(spec.part_shape(p)) for p in (PACKED, SCALE))
        name = component_of(config, spec.parameter)
        seen = totals.get(name, (0, 0))
        totals[name] = (seen[0] + parameters, seen[1] + num_bytes)
    return totals


def state_numbers(config: ModelConfig) -> dict[str, int]:
    """State bytes as the mechanisms define them."""
    heads, dim = config.kda.num_heads, config.kda.head_dim
    tail = config.kda.short_conv_kernel_size - 1
    block = config.attn_res_block_size
    num_blocks = len(range(0, config.num_hidden_layers, block)) if block else 0
    return {
        "recurrent": len(config.kda_layers) * heads * dim * dim * 4,
        "conv": len(config.kda_layers) * 3 * heads * dim * tail * 2,
        "mla": len(config.mla_layers) * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * 2,
        "attn_res": (num_blocks + 1) * config.hidden_size * 2 if block else 0,
    }


def check_every_number(config: ModelConfig, budget: Budget, storage: Storage) -> None:
    components = counted(config, storage)
    for part in budget.text:
        assert (part.parameters, part.num_bytes) == components.pop(part.name, (0, 0)), part.name
    assert components == {}
    parameters = {part.name: part.parameters for part in budget.text}
    num_bytes = {part.name: part.num_bytes for part in budget.text}
    assert budget.text_parameters == sum(parameters.values())
    assert budget.text_bytes == budget.total_bytes == sum(num_bytes.values())
    moe = config.moe
    share = moe.num_experts_per_token / moe.num_experts if moe and config.moe_layers else 0
    active = sum(parameters.values()) - (1 - share) * parameters["routed_experts"]
    assert budget.active_parameters == active
    assert budget.active_parameters_without_embedding == active - parameters["embed_tokens"]
    assert budget.active_parameters_without_tables == (
        active - parameters["embed_tokens"] - parameters["lm_head"]
    )
    read = sum(num_bytes.values()) - (1 - share) * num_bytes["routed_experts"]
    row = num_bytes["embed_tokens"] // config.vocab_size
    assert budget.weight_bytes_per_token == read - num_bytes["embed_tokens"] + row
    state = state_numbers(config)
    assert budget.state.recurrent_bytes == state["recurrent"]
    assert budget.state.conv_bytes == state["conv"]
    assert budget.state.bytes_per_sequence == state["recurrent"] + state["conv"]
    assert budget.state.mla_bytes_per_token == state["mla"]
    assert budget.state.attn_res_bytes_per_token == state["attn_res"]
    assert budget.state.sequence_bytes(11) == (
        state["recurrent"] + state["conv"] + 11 * state["mla"]
    )


def _kda(**values: object) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, kda=replace(config.kda, **values))


def _mla(**values: object) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, mla=replace(config.mla, **values))


def _moe(**values: object) -> Callable[[ModelConfig], ModelConfig]:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.moe is not None
        return replace(config, moe=replace(config.moe, **values))

    return change


def _top(**values: object) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, **values)


CHANGES: dict[str, tuple[Callable[[ModelConfig], ModelConfig], str]] = {
    # what is changed -> the components and states that may move
    "vocab_size": (_top(vocab_size=352), "embed_tokens lm_head"),
    "hidden_size": (
        _top(hidden_size=48),
        "shared_experts latent_projections routers kda_layers mla_layers dense_ffn attn_res "
        "layer_norms embed_tokens lm_head attn_res_scratch",
    ),
    "num_hidden_layers": (
        _top(num_hidden_layers=8),
        "mla_layers dense_ffn attn_res layer_norms mla",
    ),
    "intermediate_size": (_top(intermediate_size=80), "dense_ffn"),
    "kda_layers": (_top(kda_layers=(0, 1, 2, 4)), "kda_layers mla_layers recurrent conv mla"),
    "moe_layers": (
        _top(moe_layers=(3, 4, 5, 6)),
        "routed_experts shared_experts latent_projections routers dense_ffn",
    ),
    "no moe": (
        _top(moe_layers=(), moe=None),
        "routed_experts shared_experts latent_projections routers dense_ffn",
    ),
    "attn_res_block_size": (_top(attn_res_block_size=2), "attn_res_scratch"),
    "no attn_res": (_top(attn_res_block_size=None), "attn_res attn_res_scratch"),
    "hidden_act": (_top(hidden_act="silu"), ""),
    "kda.num_heads": (_kda(num_heads=20), "kda_layers recurrent conv"),
    "kda.head_dim": (_kda(head_dim=24), "kda_layers recurrent conv"),
    "kda.short_conv_kernel_size": (_kda(short_conv_kernel_size=3), "kda_layers conv"),
    "kda.gate_lower_bound": (_kda(gate_lower_bound=None), ""),
    "kda.use_full_rank_gate": (_kda(use_full_rank_gate=False), "kda_layers"),
    "mla.num_attention_heads": (_mla(num_attention_heads=6), "mla_layers"),
    "mla.q_lora_rank": (_mla(q_lora_rank=20), "mla_layers"),
    "mla.no q_lora_rank": (_mla(q_lora_rank=None), "mla_layers"),
    "mla.kv_lora_rank": (_mla(kv_lora_rank=36), "mla_layers mla"),
    "mla.qk_nope_head_dim": (_mla(qk_nope_head_dim=14), "mla_layers"),
    "mla.qk_rope_head_dim": (_mla(qk_rope_head_dim=8), "mla_layers mla"),
    "mla.v_head_dim": (_mla(v_head_dim=11), "mla_layers"),
    "mla.mla_use_output_gate": (_mla(mla_use_output_gate=False), "mla_layers"),
    "moe.num_experts": (_moe(num_experts=10), "routed_experts routers"),
    "moe.num_experts_per_token": (_moe(num_experts_per_token=4), ""),
    "moe.moe_intermediate_size": (
        _moe(moe_intermediate_size=96),
        "routed_experts shared_experts",
    ),
    "moe.num_shared_experts": (_moe(num_shared_experts=1), "shared_experts"),
    "moe.routed_expert_hidden_size": (
        _moe(routed_expert_hidden_size=64),
        "routed_experts latent_projections",
    ),
    "moe.latent_moe_use_norm": (_moe(latent_moe_use_norm=False), "latent_projections"),
}


@pytest.mark.parametrize("storage", [K3_STORAGE, KIMI_LINEAR_STORAGE], ids=["k3", "kimi_linear"])
@pytest.mark.parametrize("field", CHANGES)
def test_one_changed_field_moves_exactly_its_numbers(field: str, storage: Storage) -> None:
    change, moving = CHANGES[field]
    base, config = small_config(), change(small_config())
    before, after = derive_budget(base, storage=storage), derive_budget(config, storage=storage)
    check_every_number(base, before, storage)
    check_every_number(config, after, storage)

    def numbers(budget: Budget) -> dict[str, object]:
        state = budget.state
        return {
            **{part.name: (part.parameters, part.num_bytes) for part in budget.text},
            "recurrent": state.recurrent_bytes,
            "conv": state.conv_bytes,
            "mla": state.mla_bytes_per_token,
            "attn_res_scratch": state.attn_res_bytes_per_token,
        }

    old, new = numbers(before), numbers(after)
    assert {name for name in old if old[name] != new[name]} == set(moving.split())


def test_experts_that_do_not_fill_groups_are_refused() -> None:
    config = _moe(moe_intermediate_size=48)(small_config())
    with pytest.raises(ConfigError, match="moe_intermediate_size is 48"):
        derive_budget(config)
    assert derive_budget(config, storage=KIMI_LINEAR_STORAGE).text_bytes > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_bias", True), ("mlp_type", "mlp3"), ("vt_hidden_size", 0), ("merge_kernel_size", [2])],
)
def test_other_vision_towers_are_refused(key: str, value: object) -> None:
    raw = {**vision(), key: value}
    with pytest.raises(ConfigError, match=key):
        derive_budget(small_config(), vision=raw)
