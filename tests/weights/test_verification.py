import json
import math
from pathlib import Path

import pytest
import torch

from moonlet.core.budget import budget_of
from moonlet.core.errors import CheckpointError, CorruptShard, MissingTensor, TensorShapeMismatch
from moonlet.core.hf_config import read_config
from moonlet.weights.checkpoint import Checkpoint, load_model
from tests.weights import tampering
from tests.weights.tampering import FIRST, LAYER, SHARD, copied, golden_checkpoint

EXPERT = LAYER + "block_sparse_moe.experts.5.w1."


# ---- names ---------------------------------------------------------------------------------------


def test_a_renamed_tensor_is_named_on_both_sides(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    old, new = LAYER + "self_attn.o_proj.weight", LAYER + "self_attn.out_proj.weight"
    tampering.rename(folder, SHARD, old, new)
    report = Checkpoint.open(folder).report
    assert report.missing == (old,)
    assert report.unexpected == (new,)
    with pytest.raises(MissingTensor, match="o_proj") as caught:
        load_model(folder)
    assert old in str(caught.value)
    assert new in str(caught.value)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    for part in ("weight_packed", "weight_scale"):
        tampering.drop(folder, SHARD, EXPERT + part)
    assert Checkpoint.open(folder).report.missing == (
        EXPERT + "weight_packed",
        EXPERT + "weight_scale",
    )
    with pytest.raises(MissingTensor, match=r"experts\.5\.w1\.weight_scale"):
        load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.3.self_attn.rotary.inv_freq",
        # a KDA tensor in an MLA layer, an expert and a layer too many, a vision tensor without
        # a vision_config
        LAYER + "self_attn.q_conv1d.weight",
        LAYER + "block_sparse_moe.experts.16.w1.weight_packed",
        "language_model.model.layers.10.input_layernorm.weight",
        "mm_projector.post_norm.weight",
    ],
)
def test_an_extra_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    tampering.add(folder, SHARD, name, "F32", [3], bytes(12))
    assert Checkpoint.open(folder).report.unexpected == (name,)
    with pytest.raises(MissingTensor, match="1 unexpected"):
        load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.o_proj.weight",
        LAYER + "block_sparse_moe.experts.5.w1.weight",
    ],
    ids=["with and without prefix", "packed and plain"],
)
def test_a_slot_cannot_be_filled_twice(name: str, tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    tampering.add(folder, SHARD, name, "BF16", [64, 64], bytes(2 * 64 * 64))
    report = Checkpoint.open(folder).report
    assert not report.is_ok
    assert report.unexpected
    with pytest.raises(MissingTensor):
        load_model(folder)


def test_names_without_prefix_are_accepted(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    for shard in sorted(folder.glob("*.safetensors")):
        header, _ = tampering.read_raw(shard)
        for name in header:
            if name != "__metadata__" and ".experts." not in name:
                tampering.rename(folder, shard.name, name, name.removeprefix("language_model."))
    bare = load_model(folder).model.state_dict()
    full = load_model(golden_checkpoint("tiny_k3")).model.state_dict()
    assert all(torch.equal(value, bare[key]) for key, value in full.items())


def test_an_expert_may_be_plain_where_packed_is_published(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    state = load_model(folder).model.state_dict()
    wanted = state["layers.3.ffn.experts.w1"][5]
    for part in ("weight_packed", "weight_scale"):
        tampering.drop(folder, SHARD, EXPERT + part)
    data = wanted.bfloat16().view(torch.uint8).numpy().tobytes()
    tampering.add(folder, SHARD, EXPERT + "weight", "BF16", list(wanted.shape), data)
    assert torch.equal(load_model(folder).model.state_dict()["layers.3.ffn.experts.w1"][5], wanted)


# ---- vision --------------------------------------------------------------------------------------


SMALL_VISION = {
    "patch_size": 2,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 5,
    "vt_hidden_size": 8,
    "vt_intermediate_size": 12,
    "vt_num_hidden_layers": 2,
    "qkv_hidden_size": 16,
    "mm_hidden_size": 8,
    "merge_kernel_size": [2, 2],
    "text_hidden_size": 96,
}


def with_vision(folder: Path) -> dict[str, tuple[int, ...]]:
    """Add a small vision tower to a checkpoint; return the shapes of its tensors."""
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"] = SMALL_VISION
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = {
        "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
        "vision_tower.patch_embed.pos_emb.weight": (4, 5, 8),
        "vision_tower.encoder.final_layernorm.weight": (8,),
        "mm_projector.proj.0.weight": (32, 32),
        "mm_projector.proj.2.weight": (96, 32),
        "mm_projector.post_norm.weight": (96,),
    }
    for block in (f"vision_tower.encoder.blocks.{i}." for i in range(2)):
        shapes[block + "norm0.weight"] = shapes[block + "norm1.weight"] = (8,)
        shapes[block + "wqkv.weight"] = (48, 8)
        shapes[block + "wo.weight"] = (8, 16)
        shapes[block + "mlp.fc0.weight"] = (12, 8)
        shapes[block + "mlp.fc1.weight"] = (8, 12)
    for name, shape in shapes.items():
        data = bytes(2 * math.prod(shape))
        tampering.add(folder, SHARD, name, "BF16", list(shape), data)
    return shapes


def test_vision_tensors_are_verified_and_not_loaded(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    shapes = with_vision(folder)
    report = load_model(folder).report
    assert set(report.verified_not_loaded) == set(shapes)
    assert report.num_loaded == 1126
    assert report.num_tensors == 1126 + len(shapes)
    vision = budget_of(read_config(folder)).vision
    assert sum(part.parameters for part in vision) == sum(map(math.prod, shapes.values()))


def test_a_text_only_copy_loads_whatever_its_config_says_of_vision(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"] = SMALL_VISION
    (folder / "config.json").write_text(json.dumps(raw))
    report = load_model(folder).report
    assert report.num_loaded == 1126
    assert report.verified_not_loaded == ()
    assert len(report.notes) == 1
    assert "text only" in report.notes[0]


def test_a_wrong_vision_tensor_is_named(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    with_vision(folder)
    shaped = "vision_tower.encoder.blocks.1.wo.weight"
    typed = "mm_projector.post_norm.weight"
    gone = "vision_tower.encoder.final_layernorm.weight"
    tampering.replace_tensor(folder, SHARD, shaped, "BF16", [16, 8])
    tampering.replace_tensor(folder, SHARD, typed, "F32", [96])
    tampering.drop(folder, SHARD, gone)
    report = Checkpoint.open(folder).report
    assert [mismatch.name for mismatch in report.mis_shaped] == [shaped]
    assert [mismatch.name for mismatch in report.mis_typed] == [typed]
    assert report.missing == (gone,)


# ---- shapes and dtypes ---------------------------------------------------------------------------


def test_mis_shaped_and_mis_typed_tensors_are_named_together(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    shaped, typed = LAYER + "self_attn.kv_b_proj.weight", LAYER + "input_layernorm.weight"
    tampering.replace_tensor(folder, SHARD, shaped, "BF16", [48, 224])
    tampering.replace_tensor(folder, SHARD, typed, "F32", [96])
    tampering.replace_tensor(folder, SHARD, EXPERT + "weight_scale", "BF16", [64, 2])
    report = Checkpoint.open(folder).report
    assert [(m.name, m.seen, m.expected) for m in report.mis_shaped] == [
        (shaped, "[48, 224]", "[224, 48]")
    ]
    assert {(m.name, m.seen, m.expected) for m in report.mis_typed} == {
        (typed, "F32", "BF16"),
        (EXPERT + "weight_scale", "BF16", "U8"),
    }
    with pytest.raises(TensorShapeMismatch) as caught:
        load_model(folder)
    assert all(name in str(caught.value) for name in (shaped, typed, EXPERT + "weight_scale"))


def test_every_kind_of_problem_stands_in_one_error(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    tampering.replace_tensor(folder, SHARD, LAYER + "mlp_res_proj.weight", "BF16", [96, 1])
    tampering.replace_tensor(folder, SHARD, LAYER + "mlp_res_norm.weight", "F16", [96])
    tampering.drop(folder, SHARD, EXPERT + "weight_scale")
    tampering.add(folder, SHARD, "extra", "U8", [1], b"\0")
    with pytest.raises(MissingTensor) as caught:
        load_model(folder)
    for words in ("1 missing", "1 unexpected: extra", "1 mis-shaped", "1 mis-typed"):
        assert words in str(caught.value)


# ---- files ---------------------------------------------------------------------------------------


def test_a_truncated_shard_is_refused_by_name(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    with (folder / SHARD).open("r+b") as handle:
        handle.truncate((folder / SHARD).stat().st_size - 1)
    with pytest.raises(CorruptShard, match=f"{SHARD} is truncated"):
        load_model(folder)


def test_swapped_shards_are_noticed(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    other = "model-00008-of-000011.safetensors"
    first, second = (folder / SHARD).read_bytes(), (folder / other).read_bytes()
    (folder / SHARD).write_bytes(second)
    (folder / other).write_bytes(first)
    report = Checkpoint.open(folder).report
    assert LAYER + "input_layernorm.weight" in report.misplaced
    with pytest.raises(CheckpointError, match="not where the index says"):
        load_model(folder)


def test_index_and_shard_must_agree(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    name = LAYER + "input_layernorm.weight"
    tampering.edit_index(folder, {name: None})
    assert Checkpoint.open(folder).report.misplaced == (name,)
    tampering.edit_index(folder, {name: FIRST})
    assert Checkpoint.open(folder).report.misplaced == (name,)
    tampering.edit_index(folder, {name: SHARD, "ghost": SHARD})
    assert Checkpoint.open(folder).report.misplaced == ("ghost",)


def test_missing_shards_are_listed_and_stop_a_load(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    (folder / SHARD).unlink()
    report = Checkpoint.open(folder).report
    assert report.weights == "partial"
    assert report.missing_shards == (SHARD,)
    assert report.missing == ()
    with pytest.raises(CheckpointError, match=SHARD):
        load_model(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    report = Checkpoint.open(folder).report
    assert report.weights == "absent"
    assert report.is_ok
    assert report.num_loaded == 1126
    with pytest.raises(CheckpointError, match="no weight file"):
        load_model(folder)


@pytest.mark.parametrize(
    "path", ["../a.safetensors", "/a.safetensors", "..\\a.safetensors", "a.bin"]
)
def test_an_index_cannot_lead_out_of_the_folder(path: str, tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    tampering.edit_index(folder, {LAYER + "input_layernorm.weight": path})
    with pytest.raises(CheckpointError, match="file name inside the folder"):
        Checkpoint.open(folder)


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    folder = copied("tiny_kimi_linear", tmp_path)
    merged: dict[str, dict] = {}
    buffer = b""
    for shard in sorted(folder.glob("*.safetensors")):
        header, data = tampering.read_raw(shard)
        for name, entry in header.items():
            if name != "__metadata__":
                moved = [offset + len(buffer) for offset in entry["data_offsets"]]
                merged[name] = {**entry, "data_offsets": moved}
        buffer += data
        shard.unlink()
    (folder / tampering.INDEX).unlink()
    tampering.write_raw(folder / "model.safetensors", merged, buffer)
    single = load_model(folder).model.state_dict()
    sharded = load_model(golden_checkpoint("tiny_kimi_linear")).model.state_dict()
    assert all(torch.equal(value, single[key]) for key, value in sharded.items())
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert Checkpoint.open(folder).report.is_loadable
    (folder / "b.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 weight files and no"):
        Checkpoint.open(folder)


def test_an_unreadable_index_is_refused(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    for content in ("{", "[]", '{"weight_map": {}}', '{"weight_map": []}'):
        (folder / tampering.INDEX).write_text(content)
        with pytest.raises(CheckpointError, match="index"):
            Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint.open(folder / "none")


def test_a_stale_total_size_is_noted(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    tampering.add(folder, SHARD, "extra", "U8", [1], b"\0")
    assert "3450896" in Checkpoint.open(folder).report.notes[0]
    assert Checkpoint.open(golden_checkpoint("tiny_k3")).report.notes == ()
