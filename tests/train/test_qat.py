from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import read_config
from moonlet.kernels import mxfp4
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.testing.tiny import tiny_config, tiny_model
from moonlet.train import qat
from moonlet.train.export import export_model
from moonlet.weights.checkpoint import load_model


def test_export_holds_exactly_the_weights_that_training_used(tmp_path: Path) -> None:
    model = tiny_model()
    export_model(model, tiny_config(), tmp_path / "model", {})
    stored = {}
    for shard in (tmp_path / "model").glob("*.safetensors"):
        stored.update(load_file(shard))
    checked = 0
    for layer in tiny_config().moe_layers:
        experts = model.layers[layer].ffn.experts
        for matrix in ("w1", "w2", "w3"):
            trained = mxfp4.fake_quantize(getattr(experts, matrix).data)
            for expert in range(4):
                prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}."
                packed = stored[f"{prefix}{matrix}.weight_packed"]
                scale = stored[f"{prefix}{matrix}.weight_scale"]
                assert torch.equal(mxfp4.dequantize(packed, scale), trained[expert])
                checked += 1
    assert checked == 3 * 3 * 4


def test_served_experts_compute_what_was_trained(tmp_path: Path) -> None:
    model = tiny_model()
    # only the experts differ between masters and export: everything else survives bfloat16
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." not in name:
                parameter.copy_(parameter.bfloat16().float())
    export_model(model, tiny_config(), tmp_path / "model", {})
    served = load_model(tmp_path / "model").model.eval()
    served.attn_res_form = model.attn_res_form
    qat.enable(qat.expert_modules(model))
    tokens = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(0))
    meta = BatchMeta.build([12, 18], logits="all")
    with torch.no_grad():
        expected = model.logits(model(tokens, meta, NoState(model.config)))
        seen = served.logits(served(tokens, meta, NoState(served.config)))
    assert torch.equal(seen, expected)


def test_gradients_pass_straight_through() -> None:
    weight = torch.randn(2, 4, 32, requires_grad=True)
    upstream = torch.randn(2, 4, 32)
    (mxfp4.fake_quantize(weight) * upstream).sum().backward()
    assert torch.equal(weight.grad, upstream)


def test_activations_are_quantised_only_when_asked() -> None:
    experts = qat.expert_modules(tiny_model())
    assert len(experts) == 3
    qat.enable(experts)
    assert all(e.activation_transform is None for e in experts)
    qat.enable(experts, "mxfp8")
    assert all(e.activation_transform is not None for e in experts)
    qat.disable(experts)
    assert all(e.weight_transform is e.activation_transform is None for e in experts)
    with pytest.raises(ConfigError, match="fp4"):
        qat.enable(experts, "fp4")


def test_export_writes_configuration_and_greedy_sampling(tmp_path: Path) -> None:
    model = tiny_model()
    export_model(model, tiny_config(), tmp_path / "model", {"note.txt": b"hello"})
    assert read_config(tmp_path / "model").text == tiny_config()
    text = (tmp_path / "model" / "generation_config.json").read_text()
    assert '"temperature": 0.0' in text
    assert (tmp_path / "model" / "note.txt").read_bytes() == b"hello"
    export_model(model, tiny_config(), tmp_path / "model", {})
    assert not (tmp_path / "model" / "note.txt").exists()
