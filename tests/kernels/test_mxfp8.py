import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file

from moonlet.core.errors import ConfigError, ShapeError
from moonlet.kernels import mxfp8
from tests.golden_data import count_vectors, golden_dir, require


def test_golden_codes_scales_and_values() -> None:
    vectors = load_file(require(golden_dir("model") / "ops" / "mxfp8.safetensors"))
    codes, scale = mxfp8.quantize(vectors["x"])
    assert torch.equal(codes, vectors["codes"])
    assert torch.equal(scale, vectors["scale"])
    assert torch.equal(mxfp8.dequantize(codes, scale), vectors["dequant"])
    assert torch.equal(mxfp8.fake_quantize(vectors["x"]), vectors["dequant"])
    count_vectors(1)


@pytest.mark.parametrize(
    ("rule", "largest", "scale"),
    [
        ("ceil", 448.0, 127),
        ("ceil", 449.0, 128),
        ("ceil", 224.5, 127),
        ("floor", 256.0, 127),
        ("floor", 511.0, 127),
        ("floor", 512.0, 128),
    ],
)
def test_scale_at_the_edges_of_each_rule(rule: mxfp8.Rule, largest: float, scale: int) -> None:
    x = torch.zeros(32)
    x[9] = -largest
    assert mxfp8.quantize(x, rule)[1].tolist() == [scale]


def test_the_floor_rule_saturates_and_the_ceil_rule_does_not() -> None:
    x = torch.zeros(32)
    x[:2] = torch.tensor([500.0, -500.0])
    assert mxfp8.fake_quantize(x, "floor")[:2].tolist() == [448.0, -448.0]
    assert mxfp8.fake_quantize(x, "ceil")[:2].tolist() == [512.0, -512.0]


@given(
    codes=st.lists(st.integers(0, 255).filter(lambda x: x & 127 < 127), min_size=32, max_size=32),
    scale=st.integers(0, 240),
)
def test_encoding_a_decoded_group_keeps_its_bytes(codes: list[int], scale: int) -> None:
    # with 448 (0x7E) in the group both rules must find the same scale again
    codes_I = torch.tensor([*codes[:-1], 0x7E], dtype=torch.uint8)
    scale_1 = torch.tensor([scale], dtype=torch.uint8)
    value = mxfp8.dequantize(codes_I, scale_1)
    for rule in mxfp8.RULES:
        again, scale_again = mxfp8.quantize(value, rule)
        assert torch.equal(again, codes_I)
        assert torch.equal(scale_again, scale_1)


@pytest.mark.parametrize("rule", mxfp8.RULES)
def test_fake_quantize_is_the_round_trip_with_a_straight_gradient(rule: mxfp8.Rule) -> None:
    generator = torch.Generator().manual_seed(24)
    x = torch.randn(5, 64, generator=generator, requires_grad=True)
    gradient = torch.randn(5, 64, generator=generator)
    out = mxfp8.fake_quantize(x, rule)
    out.backward(gradient)
    assert torch.equal(out, mxfp8.dequantize(*mxfp8.quantize(x, rule)))
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)
    # three mantissa bits, or half the smallest step of the group; the floor rule may saturate
    relative = 1 / 16 if rule == "ceil" else 1 / 8
    assert ((out - x).abs() <= x.abs() * relative + x.abs().amax() * 2.0**-17).all()


def test_zero_and_non_finite_groups() -> None:
    x = torch.zeros(3, 32)
    x[1, 5] = -math.inf
    x[2, 6] = math.nan
    codes, scale = mxfp8.quantize(x)
    assert scale.tolist() == [[0], [255], [255]]
    got = mxfp8.dequantize(codes, scale)
    assert torch.equal(got[0], x[0])
    assert got[1:].isnan().all()


def test_mistakes_are_named() -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        mxfp8.quantize(torch.zeros(2, 31))
    with pytest.raises(ConfigError, match="ceil, floor"):
        mxfp8.quantize(torch.zeros(32), "even")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="belong together"):
        mxfp8.dequantize(torch.zeros(64, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="uint8"):
        mxfp8.dequantize(torch.zeros(32), torch.zeros(1, dtype=torch.uint8))
