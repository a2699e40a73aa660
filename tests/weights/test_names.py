import gzip
import json

import pytest

from moonlet.core.hf_config import parse_config, read_config
from moonlet.weights.names import PACKED, SCALE, TEXT_PREFIX, Slot, is_vision, to_name, to_slot
from moonlet.weights.shapes import expected_tensors
from moonlet.weights.shards import find_shards
from tests.core.published import k3, kimi_linear_48b
from tests.golden_data import count_vectors, golden_dir, require
from tests.weights.tampering import golden_checkpoint


def test_every_released_name_maps_to_one_slot_and_back() -> None:
    folder = require(golden_dir("model") / "k3_release")
    index = json.loads(gzip.decompress((folder / "model.safetensors.index.json.gz").read_bytes()))
    names = list(index["weight_map"])
    assert len(names) == 497_220
    slots = {name: to_slot(name) for name in names}
    assert None not in slots.values()
    assert len(set(slots.values())) == len(names)
    assert all(to_name(slot, TEXT_PREFIX) == name for name, slot in slots.items() if slot)
    vision = [name for name, slot in slots.items() if slot and is_vision(slot)]
    assert len(vision) == 168

    expected = expected_tensors(read_config(folder / "config.json"))
    demanded = {
        Slot(spec.parameter, expert, part)
        for spec in expected.values()
        for expert in (range(spec.num_experts) if spec.num_experts else (None,))
        for part in spec.parts
    }
    assert demanded == set(slots.values())
    # a shard holds one layer, the tables or the vision tensors
    layers = {name: expected[slot.parameter].layer for name, slot in slots.items() if slot}
    for name, shard in index["weight_map"].items():
        layer, number = layers[name], int(shard[6:11])
        assert number == layer + 1 if layer is not None else number in (94, 95, 96)
    count_vectors(1)


@pytest.mark.parametrize("raw", [k3(), kimi_linear_48b()], ids=["k3", "kimi_linear"])
def test_every_demanded_slot_has_a_name_with_and_without_prefix(raw: dict[str, object]) -> None:
    for spec in expected_tensors(parse_config(raw)).values():
        for expert in (0, spec.num_experts - 1) if spec.num_experts else (None,):
            for part in spec.parts:
                slot = Slot(spec.parameter, expert, part)
                names = {to_name(slot, TEXT_PREFIX), to_name(slot, "")}
                assert {to_slot(name) for name in names} == {slot}
                assert len(names) == (1 if is_vision(slot) else 2)


@pytest.mark.parametrize("name", ["tiny_k3", "tiny_kimi_linear"])
def test_golden_checkpoint_names_map_both_ways(name: str) -> None:
    shards = find_shards(golden_checkpoint(name))
    prefix = TEXT_PREFIX if name == "tiny_k3" else ""
    for tensor in shards.names:
        slot = to_slot(tensor)
        assert slot is not None
        assert to_name(slot, prefix) == tensor
    count_vectors(1)


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        ("model.embed_tokens.weight", Slot("embed_tokens.weight")),
        ("language_model.lm_head.weight", Slot("lm_head.weight")),
        ("model.layers.0.mlp.up_proj.weight", Slot("layers.0.ffn.up_proj.weight")),
        (
            "language_model.model.layers.12.block_sparse_moe.experts.895.w3.weight_scale",
            Slot("layers.12.ffn.experts.w3", 895, SCALE),
        ),
        (
            "model.layers.1.block_sparse_moe.experts.0.w2.weight_packed",
            Slot("layers.1.ffn.experts.w2", 0, PACKED),
        ),
        ("model.layers.1.block_sparse_moe.experts.7.w1.weight", Slot("layers.1.ffn.experts.w1", 7)),
        (
            "model.layers.1.block_sparse_moe.shared_experts.down_proj.weight",
            Slot("layers.1.ffn.shared_experts.down_proj.weight"),
        ),
        (
            "model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
            Slot("layers.1.ffn.gate.e_score_correction_bias"),
        ),
        ("model.layers.3.self_attn.A_log", Slot("layers.3.self_attn.A_log")),
        (
            "model.layers.1.self_attn.q_proj.weight_packed",
            Slot("layers.1.self_attn.q_proj.weight", part=PACKED),
        ),
        (
            "language_model.model.layers.0.mlp.up_proj.weight_scale",
            Slot("layers.0.ffn.up_proj.weight", part=SCALE),
        ),
    ],
)
def test_a_name_fills_its_slot(name: str, slot: Slot) -> None:
    assert to_slot(name) == slot
    assert to_name(slot, TEXT_PREFIX if name.startswith(TEXT_PREFIX) else "") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "lm_head",
        "embed_tokens.weight",
        "language_model.language_model.lm_head.weight",
        "language_model.vision_tower.encoder.final_layernorm.weight",
        "vision_tower.encoder.blocks.01.wo.weight",
        "model.layers.01.input_layernorm.weight",
        "model.layers.-1.input_layernorm.weight",
        "model.layers.1.input_layernorm.bias",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.block_sparse_moe.gate_proj.weight",
        "model.layers.1.block_sparse_moe.experts.w1.weight",
        "model.layers.1.block_sparse_moe.experts.00.w1.weight",
        "model.layers.1.block_sparse_moe.experts.0.w4.weight",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight_shape",
        "model.layers.1.ffn.experts.0.w1.weight",
        "model.layers.1.self_attn.q_conv1d.weight_packed",
        "model.layers.1.self_attn.q_proj.weight_shape",
        "lm_head.weight_packed",
        "model.layers.1.input_layernorm.weight\n",
    ],
)
def test_a_name_of_no_known_form_has_no_slot(name: str) -> None:
    assert to_slot(name) is None


@pytest.mark.parametrize(
    "slot", [Slot("layers.0.ffn.experts.w1"), Slot("layers.0.ffn.w1"), Slot("head.weight")]
)
def test_a_slot_outside_the_architecture_has_no_name(slot: Slot) -> None:
    with pytest.raises(KeyError):
        to_name(slot)
