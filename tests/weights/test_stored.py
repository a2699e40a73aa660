"""Inference on weights as stored, and the options that round."""

import logging

import pytest
import torch

from moonlet.core.errors import BackendUnavailable, ConfigError
from moonlet.kernels import _native
from moonlet.model.latent_moe import Experts
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.weights.checkpoint import load_for_inference, load_model
from moonlet.weights.trunk import quantize_rows
from tests.golden_data import golden_dir, require

IS_NATIVE = bool(_native.isa_levels())


def folder(family="tiny_k3"):
    return require(golden_dir("model") / family / "checkpoint")


def logits(model):
    ids = torch.arange(40) * 7 % model.config.vocab_size
    with torch.inference_mode():
        meta = BatchMeta.build([40], logits="all")
        return model.logits(model(ids, meta, NoState(model.config)))


def test_matrices_keep_their_published_bytes_where_native_kernels_read_them():
    model = load_for_inference(folder()).model
    if not IS_NATIVE:
        assert model.kernels.backend("linear") == "reference"
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        return
    state, wide = model.state_dict(), load_model(folder()).model.state_dict()
    assert state["lm_head.weight"].dtype == torch.bfloat16
    assert state["layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert state["layers.0.input_layernorm.weight"].dtype == torch.float32
    experts = next(m for m in model.modules() if isinstance(m, Experts))
    held = sum(b.numel() for b in experts.buffers())
    size_in, width = model.config.expert_input_size, model.config.moe.moe_intermediate_size
    assert held == model.config.moe.num_experts * 3 * size_in * width * 17 // 32
    assert not list(experts.parameters())
    for name, tensor in state.items():
        if name in wide:
            assert torch.equal(tensor.float(), wide[name]), name


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_it_computes_what_wide_weights_compute(mode):
    for family in ("tiny_k3", "tiny_kimi_linear"):
        got = logits(load_for_inference(folder(family), mode=mode).model)
        assert torch.allclose(got, logits(load_model(folder(family)).model), atol=1e-4)


def test_without_native_kernels_weights_are_widened(monkeypatch):
    monkeypatch.setattr(_native, "_load", lambda: (None, "native kernels: not built"))
    model = load_for_inference(folder()).model
    assert model.lm_head.weight.dtype == torch.float32
    assert model.kernels.backend("linear") == "reference"
    assert torch.allclose(logits(model), logits(load_model(folder()).model), atol=1e-5)
    with pytest.raises(BackendUnavailable):
        load_for_inference(folder(), kernels={"linear": "cpu"})


def test_wanted_backends_are_used_with_and_without_stored_weights():
    wanted = {"kda_chunk": "reference", "linear": "reference"}
    model = load_for_inference(folder(), kernels=wanted).model
    assert model.kernels.backend("kda_chunk") == model.kernels.backend("linear") == "reference"
    assert model.lm_head.weight.dtype == torch.float32


def test_every_option_changes_the_logits_and_bad_ones_are_refused():
    plain = logits(load_for_inference(folder()).model)
    options = [{"moe_activation": mode} for mode in ("mxfp8", "mxfp8-floor", "int8")]
    options.append({"trunk": "int8"})
    options.append({"trunk": "int8", "trunk_activation": "int8"})
    results = [logits(load_for_inference(folder(), **o).model) for o in options]
    for index, result in enumerate(results):
        assert not torch.equal(result, plain)
        assert all(not torch.equal(result, other) for other in results[:index])
    with pytest.raises(ConfigError, match="mxfp8-floor"):
        load_for_inference(folder(), moe_activation="fp8")
    with pytest.raises(ConfigError, match="int8"):
        load_for_inference(folder(), trunk="int4")
    with pytest.raises(ConfigError, match="bf16, int8"):
        load_for_inference(folder(), trunk="int8", trunk_activation="fp8")
    with pytest.raises(ConfigError, match="needs trunk int8; trunk is stored"):
        load_for_inference(folder(), trunk_activation="int8")


def test_modes_round_alike_with_and_without_native_kernels(monkeypatch):
    got = logits(load_for_inference(folder(), moe_activation="int8").model)
    monkeypatch.setattr(_native, "_load", lambda: (None, "native kernels: not built"))
    want = logits(load_for_inference(folder(), moe_activation="int8").model)
    plain = logits(load_for_inference(folder()).model)
    assert (got - want).abs().mean() < (plain - want).abs().mean() / 2


@pytest.mark.skipif(not IS_NATIVE, reason="native kernels are not built")
def test_an_int8_trunk_with_int8_inputs_is_the_same_model_without_native_kernels(monkeypatch):
    options = {"trunk": "int8", "trunk_activation": "int8"}
    model = load_for_inference(folder(), **options).model
    assert model.lm_head.weight.dtype == torch.uint8
    assert model.lm_head.weight.dim() == 4
    got, rows = logits(model), logits(load_for_inference(folder(), trunk="int8").model)
    monkeypatch.setattr(_native, "_load", lambda: (None, "native kernels: not built"))
    want = logits(load_for_inference(folder(), **options).model)
    assert (got - want).abs().mean() < (rows - want).abs().mean() / 2


def test_int8_rows_are_within_half_a_step():
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0.0
    codes, scale = quantize_rows(weight)
    assert codes.dtype == torch.int8
    assert scale[3] == 0.0
    gap = (codes.float() * scale[:, None] - weight.float()).abs()
    assert (gap <= scale[:, None] * 0.5 + 1e-7).all()
    assert codes.abs().amax(1)[:3].tolist() == [127, 127, 127]


def test_an_int8_trunk_reports_its_error(caplog):
    with caplog.at_level(logging.INFO, logger="moonlet.weights.loader"):
        model = load_for_inference(folder(), trunk="int8").model
    assert model.lm_head.weight.dtype == torch.int8
    assert model.lm_head.scale is not None
    assert "relative error" in caplog.text
    assert model.embed_tokens.weight.dtype != torch.int8
