import math

import pytest
import torch

from moonlet.core.errors import ConfigError
from moonlet.model.transformer import Transformer
from moonlet.testing.tiny import tiny_config
from moonlet.train.init import InitOptions, check_first_loss, check_tensors, initialize

OPTIONS = InitOptions(projection_gain=0.5, seed=1)


def initialized(options: InitOptions = OPTIONS) -> Transformer:
    model = Transformer(tiny_config())
    initialize(model, tiny_config(), options)
    return model


def test_every_tensor_follows_its_rule() -> None:
    model = initialized()
    check_tensors(model, tiny_config(), OPTIONS)
    tensors = dict(model.state_dict())
    assert float(tensors["layers.0.ffn.down_proj.weight"].std()) == pytest.approx(
        0.5 / math.sqrt(64), rel=0.1
    )
    assert float(tensors["embed_tokens.weight"][:511].std()) == pytest.approx(0.02, rel=0.05)
    assert not tensors["embed_tokens.weight"][511].any()
    assert not tensors["layers.1.mlp_res_proj.weight"].any()
    assert not tensors["layers.0.self_attn.A_log"].any()
    assert float(tensors["layers.0.self_attn.q_conv1d.weight"].abs().max()) <= 0.5
    assert float(tensors["layers.1.ffn.gate.weight"].abs().max()) <= 1 / math.sqrt(32)


def test_decay_time_constants_start_between_2_and_200_tokens() -> None:
    bias = initialized().layers[0].self_attn.dt_bias.data
    decay = -5.0 * torch.sigmoid(bias)
    assert float(decay.min()) > -0.48
    assert float(decay.max()) < -0.0049


def test_the_fixed_deviation_ignores_the_width() -> None:
    model = initialized(InitOptions(seed=1))
    assert float(model.layers[0].ffn.down_proj.weight.data.std()) == pytest.approx(0.02, rel=0.1)


def test_the_seed_decides() -> None:
    first, again = initialized().state_dict(), initialized().state_dict()
    other = initialized(InitOptions(projection_gain=0.5, seed=2)).state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.1.ffn.experts.w2", lambda t: t.fill_(math.nan), "not finite"),
        ("layers.1.ffn.experts.w2", lambda t: t.mul_(1.5), "deviation"),
        ("lm_head.weight", lambda t: t.add_(0.1), "mean"),
        ("norm.weight", lambda t: t.fill_(1.1), "mean"),
        ("layers.1.ffn.gate.e_score_correction_bias", lambda t: t.fill_(1e-3), "mean"),
    ],
)
def test_preflight_finds_wrong_tensors(name: str, change: object, message: str) -> None:
    model = initialized()
    with torch.no_grad():
        change(model.state_dict(keep_vars=True)[name])  # type: ignore[operator]
    with pytest.raises(ConfigError, match=f"{name}: {message}"):
        check_tensors(model, tiny_config(), OPTIONS)


def test_first_loss_must_be_that_of_a_uniform_guess() -> None:
    check_first_loss(math.log(512) * 1.04, 512)
    for loss in (math.log(512) * 1.06, math.log(512) * 0.94, math.nan):
        with pytest.raises(ConfigError, match="before training"):
            check_first_loss(loss, 512)
