import json
from pathlib import Path

import pytest
import torch

from moonlet.core.errors import (
    CheckpointError,
    ConfigError,
    CorruptShard,
    MissingTensor,
    TensorShapeMismatch,
)
from moonlet.kernels import mxfp4
from moonlet.model.transformer import Transformer
from moonlet.weights.checkpoint import Checkpoint, load_model
from moonlet.weights.extents import read_header
from moonlet.weights.loader import flatten_a_log, load_into
from moonlet.weights.names import PACKED, SCALE, Slot, to_name
from moonlet.weights.reader import ShardReader
from tests.golden_data import count_vectors
from tests.weights import tampering
from tests.weights.tampering import FIRST, LAYER, SHARD, copied, golden_checkpoint

CHECKPOINTS = ["tiny_k3", "tiny_kimi_linear"]
EXPERT = LAYER + "block_sparse_moe.experts.5.w1."
A_LOG = "language_model.model.layers.0.self_attn.A_log"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor_is_consumed_exactly_once(name: str) -> None:
    folder = golden_checkpoint(name)
    progress: list[tuple[int, int]] = []
    loaded = load_model(folder, on_progress=lambda *step: progress.append(step))
    report = loaded.report
    assert report.is_loadable
    assert report.num_loaded == report.num_tensors == len(Checkpoint.open(folder).extents)
    assert report.verified_not_loaded == ()
    assert not loaded.model.training
    done = [step for step, _ in progress]
    assert done == sorted(set(done))
    assert progress[-1] == (done[-1], done[-1])
    assert {total for _, total in progress} == {done[-1]}
    # memory that nobody wrote is NaN here
    for parameter, value in loaded.model.state_dict().items():
        assert torch.isfinite(value).all(), parameter
    count_vectors(1)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_parameter_holds_its_tensor(name: str) -> None:
    checkpoint = Checkpoint.open(golden_checkpoint(name))
    state = load_model(checkpoint.directory).model.state_dict()
    prefix = "language_model." if checkpoint.config.is_wrapped else ""
    with ShardReader(checkpoint.extents, "pread") as reader:
        for spec in checkpoint.expected.values():
            value = state[spec.parameter]
            for expert in range(spec.num_experts) if spec.num_experts else (None,):
                part = value if expert is None else value[expert]
                if spec.packed:
                    packed, scale = (
                        reader.read(to_name(Slot(spec.parameter, expert, p), prefix))
                        for p in (PACKED, SCALE)
                    )
                    wanted = mxfp4.dequantize(packed, scale, backend="reference")
                else:
                    wanted = reader.read(to_name(Slot(spec.parameter, expert), prefix))
                if spec.parameter.endswith("A_log"):
                    wanted = wanted.flatten()[:4]
                assert torch.equal(part, wanted.float()), spec.parameter
    count_vectors(1)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_both_read_modes_give_the_same_model(name: str) -> None:
    mapped = load_model(golden_checkpoint(name), mode="mmap").model.state_dict()
    copied_in = load_model(golden_checkpoint(name), mode="pread").model.state_dict()
    assert mapped.keys() == copied_in.keys()
    assert all(torch.equal(value, copied_in[key]) for key, value in mapped.items())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_small_tensors_stay_float32_in_a_bf16_model(name: str) -> None:
    exact = load_model(golden_checkpoint(name)).model.state_dict()
    rounded = load_model(golden_checkpoint(name), dtype=torch.bfloat16).model.state_dict()
    small = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    for parameter, value in rounded.items():
        assert value.dtype == (torch.float32 if parameter.endswith(small) else torch.bfloat16)
        # stored values are bf16 or MXFP4, both of which bf16 holds exactly
        assert torch.equal(value.float(), exact[parameter]), parameter


def test_reading_modes_agree_and_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    extents = Checkpoint.open(folder).extents
    with ShardReader(extents, "mmap") as mapped, ShardReader(extents, "pread") as pread:
        for name in extents:
            assert torch.equal(mapped.read(name), pread.read(name))
        tensor = mapped.read(EXPERT + "weight_scale")
        with pytest.raises(MissingTensor, match="no tensor x"):
            mapped.read("x")
    before = tensor.clone()
    tensor.fill_(0)
    # the view is private: the file keeps its bytes
    with ShardReader(extents, "pread") as reader:
        assert torch.equal(reader.read(EXPERT + "weight_scale"), before)
    with pytest.raises(ConfigError, match="mmap, pread"):
        ShardReader(extents, "direct")


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_misaligned_tensors_are_read(mode: str, tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    file = folder / "odd.safetensors"
    values = torch.tensor([1.5, -2.0, 3.25])
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "values": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
        "none": {"dtype": "F32", "shape": [0], "data_offsets": [13, 13]},
    }
    tampering.write_raw(file, header, b"\x07" + values.numpy().tobytes())
    with ShardReader(read_header(file), mode) as reader:
        assert torch.equal(reader.read("values"), values)
        assert reader.read("byte").item() == 7
        assert reader.read("none").shape == (0,)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_a_shard_cut_after_opening_is_noticed(mode: str, tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    checkpoint = Checkpoint.open(folder)
    last = max(
        (e for e in checkpoint.extents.values() if e.file.name == SHARD), key=lambda e: e.offset
    )
    with (folder / SHARD).open("r+b") as handle:
        handle.truncate(last.offset + 1)
    with (
        ShardReader(checkpoint.extents, mode) as reader,
        pytest.raises(CorruptShard, match=SHARD),
    ):
        reader.read(last.name)


# ---- values --------------------------------------------------------------------------------------


def test_padding_of_a_log_must_be_zero(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    values = torch.frombuffer(
        bytearray(tampering.tensor_bytes(folder, FIRST, A_LOG)), dtype=torch.float32
    )
    assert values.shape == (32,)
    model = load_model(folder).model
    assert torch.equal(model.state_dict()["layers.0.self_attn.A_log"], values[:4])
    values[31] = 1e-30
    tampering.replace_tensor(folder, FIRST, A_LOG, "F32", [32], values.numpy().tobytes())
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.A_log has 1 non-zero"):
        load_model(folder)


@pytest.mark.parametrize("shape", [[4], [7], [1, 1, 4, 1], [1, 1, 9, 1]])
def test_a_log_may_have_any_of_its_shapes(shape: list[int], tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    data = torch.zeros(shape)
    data.view(-1)[:4] = torch.tensor([0.5, 1.0, 1.5, 2.0])
    tampering.replace_tensor(folder, FIRST, A_LOG, "F32", shape, data.numpy().tobytes())
    state = load_model(folder).model.state_dict()
    assert state["layers.0.self_attn.A_log"].tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("shape", [[3], [1, 1, 3, 1], [4, 1], [1, 4, 1, 1]])
def test_other_shapes_of_a_log_are_refused(shape: list[int], tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    tampering.replace_tensor(folder, FIRST, A_LOG, "F32", shape)
    with pytest.raises(TensorShapeMismatch, match="A_log"):
        load_model(folder)


def test_a_log_is_flattened() -> None:
    value = torch.arange(1.0, 5.0).reshape(1, 1, 4, 1)
    assert flatten_a_log("A_log", value, 4).tolist() == [1, 2, 3, 4]
    with pytest.raises(TensorShapeMismatch, match="4 values for 5 heads"):
        flatten_a_log("A_log", value, 5)
    with pytest.raises(CheckpointError, match="2 non-zero values after its 2 heads"):
        flatten_a_log("A_log", value, 2)
    poisoned = torch.tensor([1.0, float("nan")])
    with pytest.raises(CheckpointError, match="non-zero"):
        flatten_a_log("A_log", poisoned, 1)


def test_a_nan_scale_stops_the_load(tmp_path: Path) -> None:
    folder = copied("tiny_k3", tmp_path)
    data = bytearray(tampering.tensor_bytes(folder, SHARD, EXPERT + "weight_scale"))
    data[17] = 255
    name = EXPERT + "weight_scale"
    tampering.replace_tensor(folder, SHARD, name, "U8", [64, 2], bytes(data))
    with pytest.raises(CheckpointError, match=r"experts\.5\.w1\.weight_scale holds .*255"):
        load_model(folder)


def test_a_model_of_another_configuration_is_refused() -> None:
    other = Checkpoint.open(golden_checkpoint("tiny_kimi_linear"))
    model = Transformer(other.config.text)
    with pytest.raises(CheckpointError, match="disagree"):
        load_into(model, Checkpoint.open(golden_checkpoint("tiny_k3")))


@pytest.mark.parametrize(
    ("key", "value"), [("kv_cache_scheme", {"num_bits": 8}), ("format", "nvfp4-pack-quantized")]
)
def test_quantisation_that_is_not_understood_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    folder = copied("tiny_k3", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["quantization_config"][key] = value
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=key):
        load_model(folder)
