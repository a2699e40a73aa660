"""Linear layers that a checkpoint holds as MXFP4 pairs."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from moonlet.core.errors import MissingTensor
from moonlet.kernels import _native, mxfp4
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.testing import tiny_config, tiny_model
from moonlet.weights.checkpoint import Checkpoint, load_for_inference, load_model
from moonlet.weights.writer import save_model
from tests.weights import tampering
from tests.weights.tampering import LAYER, SHARD, copied

FIRST_LAYER = "language_model.model.layers.0."
# published map, and its module
MAPS = {
    FIRST_LAYER + "mlp.gate_proj": "layers.0.ffn.gate_proj",
    FIRST_LAYER + "mlp.down_proj": "layers.0.ffn.down_proj",
    FIRST_LAYER + "self_attn.k_proj": "layers.0.self_attn.k_proj",
    LAYER + "self_attn.o_proj": "layers.3.self_attn.o_proj",
    LAYER + "block_sparse_moe.shared_experts.up_proj": "layers.3.ffn.shared_experts.up_proj",
    LAYER + "block_sparse_moe.routed_expert_down_proj": "layers.3.ffn.routed_expert_down_proj",
}


def shard_of(folder: Path, name: str) -> str:
    index = json.loads((folder / tampering.INDEX).read_text())
    return index["weight_map"][name + ".weight"]


def data(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def rounded(folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and the bfloat16 values of a stored matrix."""
    shard = shard_of(folder, name)
    header, _ = tampering.read_raw(folder / shard)
    raw = bytearray(tampering.tensor_bytes(folder, shard, name + ".weight"))
    matrix = torch.frombuffer(raw, dtype=torch.bfloat16).view(header[name + ".weight"]["shape"])
    codes, scale = mxfp4.quantize(matrix.float())
    return codes, scale, mxfp4.dequantize(codes, scale, torch.bfloat16)


def pack(folder: Path, name: str) -> None:
    codes, scale, _ = rounded(folder, name)
    shard = shard_of(folder, name)
    tampering.drop(folder, shard, name + ".weight")
    for part, tensor in (("_packed", codes), ("_scale", scale)):
        full = f"{name}.weight{part}"
        tampering.add(folder, shard, full, "U8", list(tensor.shape), data(tensor))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with packed linear maps, and the same values in bfloat16."""
    packed = copied("tiny_k3", tmp_path_factory.mktemp("packed"))
    plain = copied("tiny_k3", tmp_path_factory.mktemp("plain"))
    for name in MAPS:
        pack(packed, name)
        values = rounded(plain, name)[2]
        whole = name + ".weight"
        shape, shard = list(values.shape), shard_of(plain, name)
        tampering.replace_tensor(plain, shard, whole, "BF16", shape, data(values))
    return packed, plain


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(40) * 7 % model.config.vocab_size
    with torch.inference_mode():
        meta = BatchMeta.build([40], logits="all")
        return model.logits(model(ids, meta, NoState(model.config)))


def test_a_wide_model_holds_the_decoded_values(folders: tuple[Path, Path]) -> None:
    packed, plain = (load_model(folder).model.state_dict() for folder in folders)
    assert list(packed) == list(plain)
    assert all(torch.equal(value, packed[name]) for name, value in plain.items())


@pytest.mark.skipif(not _native.isa_levels(), reason="native kernels are not built")
def test_inference_reads_the_published_bytes(folders: tuple[Path, Path]) -> None:
    model = load_for_inference(folders[0]).model
    state = model.state_dict()
    for name, module in MAPS.items():
        shard = shard_of(folders[1], name)
        for part, kept in (("packed", "weight"), ("scale", "scale")):
            tensor = state[f"{module}.{kept}"]
            assert tensor.dtype == torch.uint8
            stored = tampering.tensor_bytes(folders[0], shard, f"{name}.weight_{part}")
            assert data(tensor) == stored
    assert state["layers.0.ffn.up_proj.weight"].dtype == torch.bfloat16
    assert "layers.0.ffn.up_proj.scale" not in state
    got, want = logits(model), logits(load_for_inference(folders[1]).model)
    # one form sums in the order of the codes, the other in that of the elements
    assert torch.allclose(got, want, atol=1e-4)


def test_what_attention_reads_as_a_matrix_is_decoded(tmp_path: Path) -> None:
    config = tiny_config()
    config = dataclasses.replace(config, mla=dataclasses.replace(config.mla, kv_lora_rank=32))
    folder, name = tmp_path / "tiny", LAYER + "self_attn.kv_b_proj"
    save_model(tiny_model(config), folder, config)
    values = rounded(folder, name)[2]
    pack(folder, name)
    kv_b = load_for_inference(folder).model.state_dict()["layers.3.self_attn.kv_b_proj.weight"]
    assert kv_b.is_floating_point()
    assert torch.equal(kv_b.float(), values.float())


def test_without_native_kernels_pairs_are_widened(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "_load", lambda: (None, "native kernels: not built"))
    model = load_for_inference(folders[0]).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.skipif(not _native.isa_levels(), reason="native kernels are not built")
def test_an_int8_trunk_leaves_packed_maps_alone(folders: tuple[Path, Path]) -> None:
    model = load_for_inference(folders[0], trunk="int8").model
    state = model.state_dict()
    assert state["layers.0.ffn.gate_proj.weight"].dtype == torch.uint8
    assert state["layers.0.ffn.up_proj.weight"].dtype == torch.int8
    assert bool(torch.isfinite(logits(model)).all())


def test_half_a_pair_misses_the_other(tmp_path: Path) -> None:
    folder, name = copied("tiny_k3", tmp_path), LAYER + "self_attn.o_proj"
    pack(folder, name)
    tampering.drop(folder, SHARD, name + ".weight_scale")
    assert Checkpoint.open(folder).report.missing == (name + ".weight_scale",)
    with pytest.raises(MissingTensor, match="o_proj"):
        load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        # a plain one is there too; no linear layers
        LAYER + "self_attn.o_proj.weight_packed",
        LAYER + "mlp_res_proj.weight_packed",
        LAYER + "block_sparse_moe.gate.weight_packed",
    ],
)
def test_a_pair_that_nothing_reads_is_named(name: str, tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    tampering.add(folder, SHARD, name, "U8", [1, 32], bytes(32))
    assert Checkpoint.open(folder).report.unexpected == (name,)


def test_a_layout_without_packed_experts_has_no_pairs(tmp_path: Path) -> None:
    folder = copied("tiny_kimi_linear", tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[0].name
    header, _ = tampering.read_raw(folder / shard)
    name = next(n for n in header if n.endswith("o_proj.weight"))
    tampering.rename(folder, shard, name, name + "_packed")
    assert Checkpoint.open(folder).report.unexpected == (name + "_packed",)
