import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moonlet.core.config import ModelConfig
from moonlet.core.errors import CheckpointError, ConfigError, TensorShapeMismatch
from moonlet.core.hf_config import parse_config, read_config, to_published
from moonlet.kernels import mxfp4
from moonlet.model.transformer import Transformer
from moonlet.weights.checkpoint import Checkpoint, load_model
from moonlet.weights.reader import ShardReader
from moonlet.weights.writer import published_object, save_model, to_stored_dtype
from tests.core.published import small_config
from tests.golden_data import count_vectors
from tests.weights.tampering import INDEX, golden_checkpoint


def filled(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model of random float32 values."""
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn(value.shape, generator=generator))
    return model


def test_every_file_is_as_readable_as_a_new_one(tmp_path: Path) -> None:
    config = small_config()
    saved = save_model(filled(config), tmp_path / "out", config)
    reference = tmp_path / "new"
    reference.touch()
    modes = {path.stat().st_mode for path in saved.directory.iterdir()}
    assert modes == {reference.stat().st_mode}


@pytest.mark.parametrize("name", ["tiny_k3", "tiny_kimi_linear"])
def test_a_loaded_checkpoint_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    original = Checkpoint.open(golden_checkpoint(name))
    loaded = load_model(original.directory)
    saved = save_model(loaded.model, tmp_path / "out", loaded.config.text)
    written = Checkpoint.open(saved.directory)
    assert written.config.text == original.config.text
    assert written.config.is_wrapped == original.config.is_wrapped
    assert {n: (e.dtype, e.shape) for n, e in written.extents.items()} == {
        n: (e.dtype, e.shape) for n, e in original.extents.items()
    }
    with ShardReader(original.extents) as old, ShardReader(written.extents) as new:
        for tensor in original.extents:
            assert torch.equal(old.read(tensor), new.read(tensor)), tensor
    again = load_model(saved.directory).model.state_dict()
    for parameter, value in loaded.model.state_dict().items():
        assert torch.equal(value, again[parameter]), parameter
    index = json.loads((original.directory / INDEX).read_text())
    assert saved.total_size == index["metadata"]["total_size"]
    assert saved.num_tensors == len(index["weight_map"])
    count_vectors(1)


def test_shards_have_the_published_names_and_content(tmp_path: Path) -> None:
    original = golden_checkpoint("tiny_k3")
    loaded = load_model(original)
    steps: list[tuple[int, int]] = []
    save_model(
        loaded.model,
        tmp_path / "out",
        loaded.config.raw,
        on_progress=lambda *step: steps.append(step),
    )
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index == json.loads((original / INDEX).read_text())
    for shard in sorted(set(index["weight_map"].values())):
        assert (tmp_path / "out" / shard).read_bytes() == (original / shard).read_bytes(), shard
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == loaded.config.raw
    assert steps == [(shard, 11) for shard in range(1, 12)]
    count_vectors(11)


@pytest.mark.parametrize("attn_res", [3, None], ids=["k3", "kimi_linear"])
def test_a_float32_model_is_rounded_once(attn_res: int | None, tmp_path: Path) -> None:
    config = replace(small_config(), attn_res_block_size=attn_res)
    model = filled(config)
    save_model(model, tmp_path / "out", config)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.config.is_wrapped is (attn_res is not None)
    loaded = load_model(tmp_path / "out").model.state_dict()
    for spec in checkpoint.expected.values():
        value, seen = model.state_dict()[spec.parameter], loaded[spec.parameter]
        if spec.packed:
            wanted = mxfp4.dequantize(*mxfp4.quantize(value, rule="even"), backend="reference")
        else:
            wanted = value.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32).float()
        assert torch.equal(seen, wanted), spec.parameter


@pytest.mark.parametrize(("num_heads", "length"), [(3, 16), (16, 16), (20, 20)])
def test_a_log_is_padded_to_head_dim(num_heads: int, length: int, tmp_path: Path) -> None:
    config = small_config()
    config = replace(config, kda=replace(config.kda, num_heads=num_heads))
    model = filled(config)
    save_model(model, tmp_path / "out", config)
    checkpoint = Checkpoint.open(tmp_path / "out")
    with ShardReader(checkpoint.extents) as reader:
        a_log = reader.read("language_model.model.layers.0.self_attn.A_log")
    assert a_log.dtype == torch.float32
    assert a_log.shape == (length,)
    wanted = model.state_dict()["layers.0.self_attn.A_log"]
    assert torch.equal(a_log[:num_heads], wanted)
    assert not a_log[num_heads:].any()


def nearest_even(value: float) -> int:
    """Bits of the bf16 nearest to a float32, from integer arithmetic."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low, high = bits & 0xFFFF, bits >> 16
    if low > 0x8000 or (low == 0x8000 and high & 1):
        high += 1
    return high


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    generator = torch.Generator().manual_seed(1)
    high = torch.randint(0, 0x7F7F, (4000,), generator=generator)
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = ((high[:, None] << 16) | lows).flatten()
    bits = torch.cat([bits, bits | (1 << 31)])
    values = torch.from_numpy(bits.numpy().astype(np.uint32).view(np.float32).copy())
    rounded = to_stored_dtype("w", values, torch.bfloat16).view(torch.int16)
    seen = [int(value) & 0xFFFF for value in rounded]
    assert seen == [nearest_even(value) for value in values.tolist()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4028e38])
def test_values_that_bf16_cannot_hold_are_refused(bad: float, tmp_path: Path) -> None:
    config = small_config()
    model = filled(config)
    with torch.no_grad():
        model.state_dict()["layers.1.self_attn.q_proj.weight"][2, 3] = bad
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight"):
        save_model(model, tmp_path / "out", config)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_would_be_rounded_twice_is_refused() -> None:
    with pytest.raises(CheckpointError, match="float64"):
        to_stored_dtype("w", torch.zeros(2, dtype=torch.float64), torch.bfloat16)


def test_model_and_configuration_must_agree(tmp_path: Path) -> None:
    config = small_config()
    model = filled(config)
    with pytest.raises(CheckpointError, match=r"disagree on .*g_a_proj"):
        save_model(
            model,
            tmp_path / "out",
            replace(config, kda=replace(config.kda, use_full_rank_gate=False)),
        )
    with pytest.raises(TensorShapeMismatch, match=r"layers\.0\.ffn"):
        save_model(model, tmp_path / "out", replace(config, intermediate_size=80))
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_written_with_the_weights(tmp_path: Path) -> None:
    config = small_config()
    source = tmp_path / "source.model"
    source.write_bytes(b"\x00ranks")
    save_model(
        filled(config),
        tmp_path / "out",
        config,
        tokenizer_files={"tiktoken.model": source, "tokenizer_config.json": b"{}"},
        generation_config={"temperature": 0.0, "eos_token_id": 2},
    )
    out = tmp_path / "out"
    assert (out / "tiktoken.model").read_bytes() == b"\x00ranks"
    assert (out / "tokenizer_config.json").read_bytes() == b"{}"
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"temperature": 0.0, "eos_token_id": 2}
    assert read_config(out).text == config
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source.model"]


@pytest.mark.parametrize("name", ["../x", "a/b", "config.json", "extra.safetensors"])
def test_file_names_must_be_plain(name: str, tmp_path: Path) -> None:
    config = small_config()
    with pytest.raises(ConfigError, match="plain name"):
        save_model(filled(config), tmp_path / "out", config, {name: b""})
    assert list(tmp_path.iterdir()) == []


def test_a_filled_folder_is_replaced_only_on_demand(tmp_path: Path) -> None:
    config = small_config()
    out = tmp_path / "out"
    out.mkdir()
    first = filled(config, seed=1)
    save_model(first, out, config)
    (out / "note").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        save_model(filled(config, seed=2), out, config)
    assert (out / "note").exists()
    save_model(filled(config, seed=2), out, config, overwrite=True)
    assert not (out / "note").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    config = small_config()
    out = tmp_path / "out"
    save_model(filled(config, seed=1), out, config)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    broken = filled(config, seed=2)
    with torch.no_grad():
        broken.state_dict()["norm.weight"][0] = float("nan")
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        save_model(broken, out, config, overwrite=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_plain_experts_are_written_where_the_configuration_says_so(tmp_path: Path) -> None:
    config = small_config()
    model = filled(config)
    save_model(model, tmp_path / "out", to_published(config, quantized=False))
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.config.is_wrapped
    assert not [name for name in checkpoint.extents if "weight_packed" in name]
    loaded = load_model(tmp_path / "out").model.state_dict()
    wanted = model.state_dict()["layers.2.ffn.experts.w2"].bfloat16().float()
    assert torch.equal(loaded["layers.2.ffn.experts.w2"], wanted)


def test_the_family_decides_the_layout() -> None:
    k3 = parse_config(published_object(small_config()))
    assert k3.is_wrapped
    assert k3.quantization is not None
    bare = parse_config(published_object(replace(small_config(), attn_res_block_size=None)))
    assert not bare.is_wrapped
    assert bare.quantization is None
