import math

import pytest
import torch

from moonlet.core.errors import BackendError, BackendUnavailable, ShapeError
from moonlet.kernels import _native, _native_ops
from moonlet.kernels.linear import cpu, reference
from moonlet.kernels.registry import resolve

LEVELS = _native.isa_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="native kernels are not built")
ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 29, 100)
SIZES = ((64, 3), (100, 257), (257, 100), (16, 128), (1, 1), (515, 33))
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    monkeypatch.setattr(_native_ops, "level", lambda: LEVELS.index(request.param))
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def weight_of(dtype, size_in, size_out, generator):
    if dtype != torch.int8:
        return torch.randn(size_out, size_in, generator=generator).to(dtype), None
    codes = torch.randint(-127, 128, (size_out, size_in), dtype=dtype, generator=generator)
    return codes, torch.rand(size_out, generator=generator) / 127


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
    x = torch.randn(rows, 700, generator=generator)
    sizes = ((torch.float32, 3), (torch.bfloat16, 530), (torch.int8, 257), (torch.float32, 64))
    matrices = [reference.Stored(*weight_of(dtype, 700, size, generator)) for dtype, size in sizes]
    groups = [matrices[:2], matrices[2:3], [matrices[3], matrices[1]]]
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
