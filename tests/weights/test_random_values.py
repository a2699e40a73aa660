import hashlib
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import parse_config
from moonlet.kernels import mxfp4
from moonlet.testing import tiny_config
from moonlet.weights.checkpoint import Checkpoint
from moonlet.weights.random_values import Rule, random_bytes
from moonlet.weights.reader import ShardReader
from moonlet.weights.synth import write_synthetic
from tests.core.published import k3, small_config
from tests.weights.synthetic import contents, largest_logit, values


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    first, again, other = (
        contents(write_synthetic(small_config(), tmp_path / name, seed).directory)
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    assert first == again
    assert first.keys() == other.keys()
    for name in first:
        assert (first[name] == other[name]) is (not name.endswith(".safetensors")), name


def test_a_tensor_depends_on_its_name_alone(tmp_path: Path) -> None:
    """The same tensor of a model with other layers, experts and vocabulary has the same bytes."""
    config = small_config()
    moe = replace(config.moe, num_experts=3)
    other = replace(config, num_hidden_layers=4, kda_layers=(0, 1, 2), moe_layers=(2, 3), moe=moe)
    first = Checkpoint.open(write_synthetic(config, tmp_path / "first", 3).directory)
    second = Checkpoint.open(write_synthetic(other, tmp_path / "second", 3).directory)
    assert second.extents.keys() < first.extents.keys()
    with ShardReader(first.extents) as one, ShardReader(second.extents) as two:
        for name, extent in second.extents.items():
            if first.extents[name].shape == extent.shape:
                assert torch.equal(one.read(name), two.read(name)), name
        query = "language_model.model.layers.{}.self_attn.q_proj.weight"
        assert not torch.equal(one.read(query.format(0)), one.read(query.format(1)))
        expert = "language_model.model.layers.2.block_sparse_moe.experts.{}.w1.weight_packed"
        assert not torch.equal(one.read(expert.format(0)), one.read(expert.format(1)))
        assert not torch.equal(
            one.read(expert.format(0)), one.read(expert.format(0).replace("w1", "w3"))
        )


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        (Rule("normal", 0.1), "BF16"),
        (Rule("normal", 0.1, 1.0), "F32"),
        (Rule("codes"), "U8"),
        (Rule("scales", 0.02), "U8"),
    ],
)
@pytest.mark.parametrize("count", [1, 7, 1003])
def test_pieces_do_not_change_the_bytes(rule: Rule, dtype: str, count: int) -> None:
    whole = b"".join(random_bytes(1, "a", rule, dtype, count))
    assert len(whole) == count * {"BF16": 2, "F32": 4, "U8": 1}[dtype]
    for piece in (8, 64, 2000):
        assert b"".join(random_bytes(1, "a", rule, dtype, count, piece)) == whole


def test_the_bytes_are_those_of_every_machine_and_version() -> None:
    """Known answers: a change of these numbers makes old measurements impossible to repeat."""
    codes = b"".join(random_bytes(0, "language_model.lm_head.weight", Rule("codes"), "U8", 16))
    assert codes.hex() == "1653cd14d0fddf23353577e541b3c35b"
    normal = b"".join(random_bytes(1, "x", Rule("normal", 0.5), "BF16", 4096))
    assert hashlib.sha256(normal).hexdigest()[:16] == "81fc324584faed88"


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="I64"):
        list(random_bytes(0, "x", Rule("normal", 1.0), "I64", 8))


def test_values_follow_their_rules(tmp_path: Path) -> None:
    config = tiny_config(
        vocab_size=2048,
        hidden_size=256,
        kda=replace(tiny_config().kda, num_heads=12, head_dim=64),
        moe=replace(
            tiny_config().moe,
            num_experts=24,
            routed_expert_hidden_size=96,
            moe_intermediate_size=160,
        ),
    )
    folder = write_synthetic(config, tmp_path / "out", 1).directory

    def joined(*suffixes: str) -> torch.Tensor:
        return torch.cat([value.double().flatten() for value in values(folder, *suffixes)])

    def check(suffix: str, mean: float, std: float) -> None:
        seen = joined(suffix)
        # six standard errors of the mean; the deviation of thousands of values to 5 %
        assert abs(float(seen.mean()) - mean) < 6 * std / math.sqrt(len(seen)), suffix
        assert float(seen.std()) == pytest.approx(std, rel=0.05), suffix

    check("q_proj.weight", 0, 1 / 16)
    check("lm_head.weight", 0, 1 / 16)
    check("embed_tokens.weight", 0, 1)
    check("input_layernorm.weight", 1, 0.05)
    check("conv1d.weight", 0, 0.5 / math.sqrt(3))
    check("block_sparse_moe.gate.weight", 0, 1 / 16)
    check("res_proj.weight", 0, 1 / 16)
    bias = joined("e_score_correction_bias")
    assert 0 < float(bias.abs().max()) < 0.06
    dt_bias = joined("dt_bias")
    # inverse softplus of 1e-3 and 0.1
    assert math.log(math.expm1(1e-3)) <= float(dt_bias.min()) < -6.5
    assert -2.5 < float(dt_bias.max()) <= math.log(math.expm1(0.1))
    for a_log in values(folder, "A_log"):
        assert a_log.shape == (64,)
        assert not a_log[12:].any()
        assert float(a_log[:12].abs().min()) > 0
        assert float(a_log.abs().max()) <= 0.5
        assert len(a_log[:12].unique()) == 12


def test_the_softplus_gate_gets_its_own_range(tmp_path: Path) -> None:
    kda = replace(tiny_config().kda, gate_lower_bound=None, num_heads=40)
    config = tiny_config(attn_res_block_size=None, kda=kda)
    folder = write_synthetic(config, tmp_path / "out").directory
    a_log = torch.cat([value.flatten() for value in values(folder, "A_log")])
    assert a_log.numel() == 3 * 40
    assert 0 <= float(a_log.min()) < 0.5 < 2.5 < float(a_log.max()) <= math.log(16)
    assert largest_logit(folder) > 0.5


@pytest.mark.parametrize("fan_in", [32, 160, 1024, 3584])
def test_packed_experts_have_the_deviation_of_a_projection(fan_in: int) -> None:
    rows = 300_000 // fan_in
    size = rows * fan_in
    packed, scale = (
        torch.frombuffer(
            bytearray(b"".join(random_bytes(0, f"w{fan_in}", rule, "U8", count))),
            dtype=torch.uint8,
        ).reshape(rows, -1)
        for rule, count in (
            (Rule("codes"), size // 2),
            (Rule("scales", 1 / math.sqrt(fan_in)), size // 32),
        )
    )
    assert len(packed.unique()) == 256
    assert int(scale.max()) - int(scale.min()) <= 1
    assert int(scale.max()) < 255
    seen = mxfp4.dequantize(packed, scale).double()
    assert float(seen.std()) == pytest.approx(1 / math.sqrt(fan_in), rel=0.02)
    assert abs(float(seen.mean())) < 6 / math.sqrt(fan_in * size)


def test_activations_stay_finite_over_the_depth_of_k3(tmp_path: Path) -> None:
    """The 93 layers of K3 in their real order, narrow."""
    real = parse_config(k3()).text
    config = tiny_config(
        num_hidden_layers=93,
        kda_layers=real.kda_layers,
        moe_layers=real.moe_layers,
        attn_res_block_size=12,
    )
    folder = write_synthetic(config, tmp_path / "out").directory
    assert 0.5 < largest_logit(folder, 9) < 50


def test_one_tensor_is_made_in_small_pieces() -> None:
    """A table of 64 MB needs a few megabytes beside it."""
    tracemalloc.start()
    total = sum(len(x) for x in random_bytes(0, "x", Rule("normal", 1.0), "BF16", 32_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 64_000_000
    assert peak < 8e6
