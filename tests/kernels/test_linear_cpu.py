import math

import pytest
import torch

from moonlet.core.errors import BackendError, BackendUnavailable, ShapeError
from moonlet.kernels import _native, mxfp4
from moonlet.kernels.linear import cpu, reference
from moonlet.kernels.registry import resolve

LEVELS = _native.isa_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="native kernels are not built")
ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 29, 100)
SIZES = ((64, 3), (100, 257), (257, 100), (16, 128), (1, 1), (515, 33))
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
# MXFP4: broken blocks, rows that end inside one, outputs that fill no tile and no panel
PACKED_SIZES = ((32, 1), (96, 3), (128, 100), (160, 257), (544, 65), (1056, 33))
# one row, pairs and groups of rows in registers, several groups, panels
PACKED_ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 24, 25, 100)


def weight_of(dtype, size_in, size_out, generator):
    if dtype != torch.int8:
        return torch.randn(size_out, size_in, generator=generator).to(dtype), None
    codes = torch.randint(-127, 128, (size_out, size_in), dtype=dtype, generator=generator)
    return codes, torch.rand(size_out, generator=generator) / 127


def packed_of(size_in, size_out, generator):
    codes = torch.randint(256, (size_out, size_in // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(
        118, 124, (size_out, size_in // 32), dtype=torch.uint8, generator=generator
    )
    return codes, scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_it_equals_the_reference_in_float64(level, rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    for size_in, size_out in SIZES:
        x = torch.randn(rows, size_in, generator=generator)
        weight, scale = weight_of(dtype, size_in, size_out, generator)
        got = cpu.linear(x, weight, scale)
        want = reference.linear(x.double(), weight, scale)
        # float32 sums of up to 515 products, relative to the sum of magnitudes
        bound = x.double().abs() @ weight.double().abs().T
        bound = bound if scale is None else bound * scale
        assert got.shape == want.shape
        assert ((got - want).abs() <= 5e-7 * math.sqrt(size_in) * bound + 1e-30).all()


@pytest.mark.parametrize("rows", PACKED_ROWS)
def test_packed_weights_equal_the_reference_in_float64(level, rows):
    generator = torch.Generator().manual_seed(rows)
    for size_in, size_out in PACKED_SIZES:
        x = torch.randn(rows, size_in, generator=generator)
        codes, scale = packed_of(size_in, size_out, generator)
        got = cpu.linear(x, codes, scale)
        want = reference.linear(x.double(), codes, scale)
        weight = mxfp4.dequantize(codes, scale).double()
        bound = x.double().abs() @ weight.abs().T
        assert got.shape == want.shape == (rows, size_out)
        assert ((got - want).abs() <= 5e-7 * math.sqrt(size_in) * bound + 1e-30).all()


def test_more_rows_than_one_packing_serves(level):
    generator = torch.Generator().manual_seed(2)
    codes, scale = packed_of(96, 70, generator)
    x = torch.randn(1100, 96, generator=generator)
    got = cpu.linear(x, codes, scale)
    assert torch.allclose(got.double(), reference.linear(x.double(), codes, scale), atol=1e-6)
    # batches of 512 rows: a row's result is that of a call of its own
    assert torch.equal(got[512:612], cpu.linear(x[512:612], codes, scale))


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_every_code_at_every_scale(level, rows):
    # output s has the scale s; input k is read with code k; above 252 values leave float32
    codes = torch.arange(32) % 16
    packed = mxfp4.pack(codes.to(torch.uint8)).expand(253, 16).contiguous()
    scale = torch.arange(253, dtype=torch.uint8)[:, None].contiguous()
    for k in range(16):
        x = torch.zeros(rows, 32)
        x[:, k] = 2.0**-40
        got = cpu.linear(x, packed, scale)
        want = mxfp4.dequantize(packed, scale).double()[:, k] * 2.0**-40
        # a subnormal product may be flushed by the level, never changed otherwise
        assert torch.allclose(got.double(), want.expand(rows, 253), rtol=0, atol=2.0**-126)
        assert k % 8 == 0 or len(want.unique()) == 253


def test_packed_products_take_their_own_rows_only(level):
    generator = torch.Generator().manual_seed(4)
    codes, scale = packed_of(160, 67, generator)
    for rows in (5, 16, 40):
        x = torch.randn(rows, 160, generator=generator)
        clean = cpu.linear(x, codes, scale)
        x[2, 131] = math.nan
        got = cpu.linear(x, codes, scale)
        others = torch.arange(rows) != 2
        assert torch.equal(got[others], clean[others])
        assert got[2].isnan().all()


@pytest.mark.parametrize("rows", [1, 11, 40])
def test_threads_do_not_change_a_bit_of_packed_products(level, threads, rows):
    generator = torch.Generator().manual_seed(5)
    codes, scale = packed_of(1056, 1531, generator)
    x = torch.randn(rows, 1056, generator=generator)
    results = []
    for count in (1, 2, 3, 4):
        threads(count)
        results.append(cpu.linear(x, codes, scale))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_threads_do_not_change_a_bit(level, threads, rows):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 700, generator=generator)
    weight = torch.randn(1531, 700, generator=generator).bfloat16()
    results = []
    for count in (1, 2, 3, 4):
        threads(count)
        results.append(cpu.linear(x, weight))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_every_output_is_written(level, monkeypatch):
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(math.nan))
    for rows in (1, 6, 30):
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(rows)
            weight, scale = weight_of(dtype, 97, 131, generator)
            assert torch.isfinite(cpu.linear(torch.ones(rows, 97), weight, scale)).all()
        # the reordered inputs are poisoned too: their padding must be written
        codes, scale = packed_of(96, 131, generator)
        assert torch.isfinite(cpu.linear(torch.ones(rows, 96), codes, scale)).all()


def test_streamed_rows_do_not_depend_on_their_batch(level):
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(16, 300, generator=generator)
    weight = torch.randn(77, 300, generator=generator).bfloat16()
    together = cpu.linear(x, weight)
    assert all(torch.equal(together[i], cpu.linear(x[i], weight)) for i in range(16))


def test_leading_axes_and_strides_are_kept():
    x = torch.randn(3, 10, 64)[:, ::2]
    weight = torch.randn(20, 64)
    got = cpu.linear(x, weight)
    assert got.shape == (3, 5, 20)
    torch.testing.assert_close(got, reference.linear(x, weight))
    assert cpu.linear(x[:0], weight).shape == (0, 5, 20)
    codes, scale = packed_of(64, 20, torch.Generator().manual_seed(0))
    torch.testing.assert_close(cpu.linear(x, codes, scale), reference.linear(x, codes, scale))
    assert cpu.linear(x[:0], codes, scale).shape == (0, 5, 20)


def test_operands_that_do_not_fit_are_refused():
    weight = torch.randn(20, 64)
    with pytest.raises(ShapeError, match="rows of 64"):
        cpu.linear(torch.randn(3, 63), weight)
    with pytest.raises(ShapeError, match="float32 rows"):
        cpu.linear(torch.randn(3, 64).double(), weight)
    with pytest.raises(ShapeError, match="without scales"):
        cpu.linear(torch.randn(3, 64), weight.to(torch.int8))
    with pytest.raises(ShapeError, match="with scales"):
        cpu.linear(torch.randn(3, 64), weight, torch.ones(20))
    with pytest.raises(ShapeError, match="contiguous"):
        cpu.linear(torch.randn(3, 20), weight.T)
    codes, scale = packed_of(64, 20, torch.Generator().manual_seed(0))
    with pytest.raises(ShapeError, match="without scales"):
        cpu.linear(torch.randn(3, 64), codes)
    with pytest.raises(ShapeError, match="rows of 64"):
        cpu.linear(torch.randn(3, 32), codes, scale)
    with pytest.raises(ShapeError, match="whole groups"):
        cpu.linear(torch.randn(3, 40), codes[:, :20].contiguous(), scale)
    with pytest.raises(ShapeError, match="scale has shape"):
        cpu.linear(torch.randn(3, 64), codes, scale[:, :1].contiguous())
    with pytest.raises(ShapeError, match="scale has dtype"):
        cpu.linear(torch.randn(3, 64), codes, torch.ones(20))


def test_training_never_gets_a_kernel_without_gradient():
    assert resolve("cpu").backend("linear") == "reference"
    assert resolve("cpu", is_inference=True).backend("linear") == "cpu"
    assert resolve("cpu", is_inference=True, dtype=torch.bfloat16).backend("linear") == "reference"
    with pytest.raises(BackendUnavailable) as caught:
        resolve("cpu", wanted={"linear": "cpu"})
    assert "no gradient" in str(caught.value.reasons)


@pytest.mark.parametrize("rows", [1, 4, 9, 17, 60])
def test_many_matrices_equal_one_by_one(level, threads, rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 704, generator=generator)
    sizes = ((torch.float32, 3), (torch.bfloat16, 530), (torch.int8, 257), (torch.float32, 64))
    matrices = [reference.Stored(*weight_of(dtype, 704, size, generator)) for dtype, size in sizes]
    packed = [reference.Stored(*packed_of(704, size, generator)) for size in (90, 300)]
    groups = [[*matrices[:2], packed[0]], matrices[2:3], [matrices[3], packed[1], matrices[1]]]
    want = [torch.cat([cpu.linear(x, *m) for m in group], dim=1) for group in groups]
    for count in (1, 2, 3, 4):
        threads(count)
        got = cpu.linear_many(x, groups)
        assert all(part.is_contiguous() for part in got)
        # a product depends on its row and its weights only
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    expected = reference.linear_many(x, groups)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(got, expected, strict=True))


def test_many_matrices_refuse_what_does_not_fit():
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with pytest.raises(ShapeError, match="rows of 7"):
        cpu.linear_many(x, [[reference.Stored(weight)], [reference.Stored(weight[:, :7])]])
    with pytest.raises(ShapeError, match="use float32"):
        cpu.linear_many(x, [[reference.Stored(weight.to(torch.int8))]])
    with pytest.raises(BackendError):
        cpu.linear_many(x, [[reference.Stored(weight)] * 17])
