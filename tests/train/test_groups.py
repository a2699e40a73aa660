from collections import defaultdict

import pytest
import torch
from torch import nn

from moonlet.core.errors import ConfigError
from moonlet.model.transformer import Transformer
from moonlet.testing.tiny import tiny_config
from moonlet.train.groups import GroupKind, assign_groups, block_views

KDA_LAYER = {
    "muon_per_head": {"q_proj", "k_proj", "v_proj", "f_b_proj"},
    "muon_whole": {"f_a_proj", "b_proj", "g_proj", "o_proj"},
    "adamw_plain": {"q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias", "o_norm"},
}
MLA_LAYER = {
    "muon_per_head": {"q_b_proj", "kv_b_proj"},
    "muon_whole": {"q_a_proj", "kv_a_proj_with_mqa", "g_proj", "o_proj"},
    "adamw_plain": {"q_a_layernorm", "kv_a_layernorm"},
}
MOE = {
    "muon_experts": {"experts.w1", "experts.w2", "experts.w3"},
    "muon_whole": {
        "gate",
        "routed_expert_down_proj",
        "routed_expert_up_proj",
        "shared_experts.gate_proj",
        "shared_experts.up_proj",
        "shared_experts.down_proj",
    },
    "adamw_plain": {"routed_expert_norm"},
}
DENSE = {"muon_whole": {"gate_proj", "up_proj", "down_proj"}}
LAYER = {
    "adamw_plain": {
        "input_layernorm",
        "post_attention_layernorm",
        "self_attention_res_norm",
        "self_attention_res_proj",
        "mlp_res_norm",
        "mlp_res_proj",
    }
}
MODEL = {
    "adamw_decay": {"embed_tokens", "lm_head"},
    "adamw_plain": {"norm", "output_attn_res_norm", "output_attn_res_proj"},
}


def expected_groups() -> dict[str, str]:
    """Every parameter of the tiny model with its group, written out by mechanism."""
    table: dict[str, str] = {}

    def put(prefix: str, groups: dict[str, set[str]]) -> None:
        for kind, names in groups.items():
            for name in names:
                is_bare = name in ("A_log", "dt_bias") or name.startswith("experts.")
                table[f"{prefix}{name}" + ("" if is_bare else ".weight")] = kind

    config = tiny_config()
    put("", MODEL)
    for layer in range(config.num_hidden_layers):
        put(f"layers.{layer}.", LAYER)
        put(f"layers.{layer}.self_attn.", KDA_LAYER if config.is_kda(layer) else MLA_LAYER)
        put(f"layers.{layer}.ffn.", MOE if config.is_moe(layer) else DENSE)
    return table


def test_every_parameter_has_the_group_of_its_mechanism() -> None:
    assignments = assign_groups(Transformer(tiny_config()), tiny_config())
    assert {a.name: str(a.kind) for a in assignments} == expected_groups()


def test_blocks_are_heads_and_experts() -> None:
    config = tiny_config()
    model = Transformer(config)
    parameters = dict(model.named_parameters())
    shapes = defaultdict(set)
    for assignment in assign_groups(model, config):
        if assignment.kind.is_muon:
            leaf = assignment.name.removesuffix(".weight").rsplit(".", 1)[-1]
            views = list(block_views(assignment, parameters[assignment.name].data))
            shapes[leaf].update(tuple(v.shape) for v in views)
    assert shapes["q_proj"] == shapes["k_proj"] == shapes["v_proj"] == {(2, 16, 32)}
    assert shapes["f_b_proj"] == {(2, 16, 16)}
    assert shapes["q_b_proj"] == {(2, 24, 16)}
    assert shapes["kv_b_proj"] == {(2, 28, 24)}
    assert shapes["w1"] == {(4, 32, 32)}
    assert shapes["o_proj"] == {(1, 32, 32), (1, 32, 24)}


def test_split_kv_separates_key_and_value_rows() -> None:
    config = tiny_config()
    model = Transformer(config)
    (found,) = [a for a in assign_groups(model, config, split_kv=True) if "kv_b_proj" in a.name]
    weight = dict(model.named_parameters())[found.name].data
    keys, values = block_views(found, weight)
    assert keys.shape == (2, 16, 24)
    assert values.shape == (2, 12, 24)
    heads = weight.view(2, 28, 24)
    assert torch.equal(keys.nan_to_num(), heads[:, :16].nan_to_num())
    assert values.data_ptr() == heads[:, 16:].data_ptr()


def test_router_under_adamw_is_an_option() -> None:
    model = Transformer(tiny_config())
    kinds = {a.name: a.kind for a in assign_groups(model, tiny_config(), router_optimizer="adamw")}
    assert kinds["layers.1.ffn.gate.weight"] is GroupKind.ADAMW_DECAY
    with pytest.raises(ConfigError, match="router_optimizer"):
        assign_groups(model, tiny_config(), router_optimizer="sgd")


def test_an_unknown_parameter_is_refused() -> None:
    model = Transformer(tiny_config())
    model.layers[0].self_attn.extra = nn.Linear(3, 3, bias=False)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.extra\.weight"):
        assign_groups(model, tiny_config())
