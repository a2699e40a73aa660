import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file
from torch import Tensor

from moonlet.core.errors import BackendUnavailable, ConfigError, ShapeError
from moonlet.kernels import _native, microscaling, mxfp4
from tests.golden_data import count_vectors, golden_dir, require

DTYPES = [torch.float32, torch.bfloat16]
BACKENDS = ["reference", *(f"cpu-{level}" for level in _native.isa_levels())]


def decode(backend: str, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode with the reference or one instruction-set level, into NaN-filled memory."""
    if backend == "reference":
        return mxfp4.dequantize(packed, scale, dtype, backend="reference")
    out = torch.full((*packed.shape[:-1], packed.shape[-1] * 2), math.nan, dtype=dtype)
    return _native.mxfp4_dequantize(packed, scale, out, isa=backend.removeprefix("cpu-"))


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal bit for bit, signs of zero included; every NaN is one NaN."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


def golden() -> dict[str, Tensor]:
    return load_file(require(golden_dir("model") / "ops" / "mxfp4.safetensors"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_code_at_every_scale_decodes_to_the_golden_value(
    backend: str, dtype: torch.dtype
) -> None:
    vectors = golden()
    got = decode(backend, vectors["all_packed"], vectors["all_scale"], dtype)
    assert_same(got, vectors["all_values"].to(dtype))
    count_vectors(1)


def test_encoding_equals_the_golden_bytes() -> None:
    vectors = golden()
    packed, scale = mxfp4.quantize(vectors["quant_input"])
    is_zero_group = vectors["quant_input"].unflatten(-1, (-1, 32)).abs().amax(-1) == 0
    assert torch.equal(packed, vectors["quant_packed"])
    assert torch.equal(scale[~is_zero_group], vectors["quant_scale"][~is_zero_group])
    assert torch.equal(mxfp4.dequantize(packed, scale), vectors["quant_dequant"])
    assert torch.equal(mxfp4.fake_quantize(vectors["quant_input"]), vectors["quant_dequant"])
    count_vectors(1)


def test_golden_linear_product() -> None:
    vectors = golden()
    weight = mxfp4.dequantize(vectors["lin_packed"], vectors["lin_scale"])
    torch.testing.assert_close(vectors["lin_x"] @ weight.T, vectors["lin_y"], atol=1e-5, rtol=1e-5)
    count_vectors(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(32,), (7, 96), (3, 5, 32), (0, 64), (4, 0)], ids=str)
def test_every_backend_gives_the_values_of_the_equation(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    lead, size = shape[:-1], shape[-1]
    generator = torch.Generator().manual_seed(20)
    packed = torch.randint(0, 256, (*lead, size // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (*lead, size // 32), dtype=torch.uint8, generator=generator)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*magnitudes, *(-x for x in magnitudes)], dtype=torch.float64)
    powers = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [math.nan], dtype=torch.float64)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    want = values[codes] * powers[scale.long()].repeat_interleave(32, -1)
    assert_same(decode(backend, packed, scale, dtype), want.to(dtype))


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda x: len(x) % 2 == 0))
def test_unpack_undoes_pack(codes: list[int]) -> None:
    codes_I = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(mxfp4.unpack(mxfp4.pack(codes_I)), codes_I)


def test_the_low_nibble_is_the_first_element() -> None:
    assert mxfp4.pack(torch.tensor([0x1, 0xE], dtype=torch.uint8)).tolist() == [0xE1]


@pytest.mark.parametrize("rule", ["even", "floor"])
@given(
    codes=st.lists(st.integers(0, 15), min_size=32, max_size=32),
    largest=st.sampled_from([6, 7, 14, 15]),
    scale=st.integers(0, 252),
)
def test_encoding_a_decoded_group_gives_its_bytes_back(
    rule: mxfp4.Rule, codes: list[int], largest: int, scale: int
) -> None:
    codes[len(codes) // 2] = largest
    packed = mxfp4.pack(torch.tensor(codes, dtype=torch.uint8))
    scale_1 = torch.tensor([scale], dtype=torch.uint8)
    again, scale_again = mxfp4.quantize(mxfp4.dequantize(packed, scale_1), rule)
    assert torch.equal(again, packed)
    assert torch.equal(scale_again, scale_1)


@pytest.mark.parametrize("rule", ["even", "floor"])
@given(codes=st.lists(st.integers(0, 15), min_size=32, max_size=32), scale=st.integers(0, 252))
def test_encoding_a_decoded_group_keeps_its_values(
    rule: mxfp4.Rule, codes: list[int], scale: int
) -> None:
    packed = mxfp4.pack(torch.tensor(codes, dtype=torch.uint8))
    value = mxfp4.dequantize(packed, torch.tensor([scale], dtype=torch.uint8))
    assert_same(mxfp4.dequantize(*mxfp4.quantize(value, rule)), value)


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_a_group_is_rounded_to_the_nearest_code_of_its_scale(rule: mxfp4.Rule) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(22)) * 3
    packed, scale = mxfp4.quantize(x, rule)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    step = (2.0 ** (scale.float() - 127)).repeat_interleave(32, -1)
    nearest = (grid - (x / step).abs().unsqueeze(-1)).abs().amin(-1) * step
    got = mxfp4.dequantize(packed, scale)
    torch.testing.assert_close((got - x).abs(), nearest, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("rule", "largest", "scale"),
    [
        ("even", 6.9, 127),
        ("even", 7.0, 128),
        ("floor", 7.9, 127),
        ("floor", 8.0, 128),
        ("ceil", 4.0, 127),
        ("ceil", 4.1, 128),
        ("rceil", 6.0, 127),
        ("rceil", 6.1, 128),
    ],
)
def test_scale_at_the_edges_of_each_rule(rule: mxfp4.Rule, largest: float, scale: int) -> None:
    x = torch.zeros(32)
    x[3] = -largest
    assert mxfp4.quantize(x, rule)[1].tolist() == [scale]


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (6.5, 7)],
)
def test_ties_go_to_the_even_code(value: float, code: int) -> None:
    x = torch.zeros(32)
    x[:3] = torch.tensor([6.0, value, -value])
    packed, scale = mxfp4.quantize(x)
    assert scale.tolist() == [127]
    assert mxfp4.unpack(packed)[1:3].tolist() == [code, code | 8]


def test_zero_and_non_finite_groups() -> None:
    x = torch.zeros(3, 32)
    x[1, 5] = math.inf
    x[2, 6] = math.nan
    packed, scale = mxfp4.quantize(x)
    assert scale.tolist() == [[0], [255], [255]]
    got = mxfp4.dequantize(packed, scale)
    assert torch.equal(got[0], x[0])
    assert got[1:].isnan().all()
    assert mxfp4.fake_quantize(x)[1:].isnan().all()


@pytest.mark.parametrize("rule", mxfp4.RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_quantize_is_the_round_trip_with_a_straight_gradient(
    rule: mxfp4.Rule, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(23)
    w = torch.randn(5, 64, generator=generator).to(dtype).requires_grad_()
    gradient = torch.randn(5, 64, generator=generator).to(dtype)
    out = mxfp4.fake_quantize(w, rule)
    out.backward(gradient)
    assert torch.equal(out, mxfp4.dequantize(*mxfp4.quantize(w, rule), dtype))
    assert w.grad is not None
    assert torch.equal(w.grad, gradient)


def test_other_dtypes_come_from_the_reference() -> None:
    packed = torch.arange(16, dtype=torch.uint8)
    scale = torch.tensor([120], dtype=torch.uint8)
    want = mxfp4.dequantize(packed, scale).half()
    assert torch.equal(mxfp4.dequantize(packed, scale, torch.float16), want)
    with pytest.raises(BackendUnavailable, match="cpu"):
        mxfp4.dequantize(packed, scale, torch.float16, backend="cpu")


def test_scale_tables_are_right_when_first_made_by_a_thread_that_flushes() -> None:
    for table in (microscaling.scale_values, microscaling.inverse_scale_values):
        table.cache_clear()
    device = torch.device("cpu")
    assert torch.set_flush_denormal(True)
    try:
        scales = microscaling.scale_values(device)
        inverses = microscaling.inverse_scale_values(device)
    finally:
        torch.set_flush_denormal(False)
    powers = [2.0 ** (s - 127) for s in range(255)]
    assert scales[:255].tolist() == powers
    assert scales[255].isnan()
    assert inverses.tolist() == [*(1 / x for x in powers), 0.0]


def test_mistakes_are_named() -> None:
    packed = torch.zeros(2, 16, dtype=torch.uint8)
    scale = torch.zeros(2, 1, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="multiple of 32"):
        mxfp4.quantize(torch.zeros(33))
    with pytest.raises(ShapeError, match="floating-point"):
        mxfp4.quantize(torch.zeros(32, dtype=torch.int32))
    with pytest.raises(ConfigError, match="even, floor"):
        mxfp4.quantize(torch.zeros(32), "nearest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="choose one of"):
        mxfp4.dequantize(packed, scale, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="belong together"):
        mxfp4.dequantize(packed, scale.expand(2, 2))
    with pytest.raises(ShapeError, match="leading axes"):
        mxfp4.dequantize(packed, scale[:1])
    with pytest.raises(ShapeError, match="uint8"):
        mxfp4.dequantize(packed.int(), scale)
