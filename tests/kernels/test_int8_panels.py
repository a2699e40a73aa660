"""Products in integers: int8 weights in panels, inputs in int8 groups of 32."""

import math

import pytest
import torch

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native, _native_ops, int8_groups, int8_panels
from moonlet.kernels.linear import cpu, reference
from moonlet.kernels.linear.reference import Stored
from moonlet.weights.trunk import quantize_rows

LEVELS = _native.isa_levels()
native = pytest.mark.skipif(not LEVELS, reason="native kernels are not built")
# outputs that fill no panel and no pair of them, inputs that end inside a group, several blocks
SIZES = ((32, 16), (1, 1), (3, 17), (100, 257), (257, 100), (544, 65), (1056, 33))
# one row, small tiles, two tiles that share, streamed and in pieces, more than a block of rows
ROWS = (1, 2, 3, 5, 6, 7, 11, 13, 16, 17, 100)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def codes_of(size_in, size_out, seed):
    return torch.randint(
        -127, 128, (size_out, size_in), dtype=torch.int8, generator=generator(seed)
    )


def weight_of(size_in, size_out, seed):
    codes = codes_of(size_in, size_out, seed)
    scale = torch.rand(size_out, generator=generator(seed)) / 127
    return int8_panels.pack(codes), scale


def test_panels_hold_four_inputs_of_sixteen_outputs_side_by_side():
    codes = codes_of(40, 20, 1)
    panels = int8_panels.pack(codes)
    assert panels.shape == (2, 16, 16, 4)
    assert panels.dtype == torch.uint8
    assert int8_panels.is_panels(panels)
    assert not int8_panels.is_panels(codes)
    assert int(panels[1, 5, 2, 3]) == int(codes[16 + 2, 4 * 5 + 3]) + 128
    # zeros where nothing is
    assert (panels[0, 10:] == 128).all()
    assert (panels[1, :, 4:] == 128).all()
    restored = int8_panels.unpack(panels, 20)
    assert torch.equal(restored[:, :40], codes)
    assert restored.shape == (20, 64)


def test_the_reference_is_the_product_of_rounded_inputs():
    codes, scale = codes_of(96, 20, 2), torch.rand(20, generator=generator(3))
    x = torch.randn(7, 96, generator=generator(4))
    got = reference.linear(x, int8_panels.pack(codes), scale)
    want = reference.linear(int8_groups.fake_quantize(x).double(), codes, scale)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-5)
    # and not that of the inputs
    plain = reference.linear(x.double(), codes, scale)
    assert (plain - want).abs().max() > 1e-3 * plain.abs().max()


@native
@pytest.mark.parametrize("rows", ROWS)
def test_it_equals_the_reference(level, rows):
    for size_in, size_out in SIZES:
        x = torch.randn(rows, size_in, generator=generator(rows))
        panels, scale = weight_of(size_in, size_out, rows)
        got = cpu.linear(x, panels, scale)
        want = reference.linear(x, panels, scale)
        assert got.shape == want.shape == (rows, size_out)
        bound = x.abs() @ int8_panels.unpack(panels, size_out)[:, :size_in].float().abs().T * scale
        assert ((got - want).abs() <= 1e-6 * bound + 1e-30).all()


@native
@pytest.mark.parametrize("rows", [1, 4, 17])
def test_sums_of_integers_are_exact(level, rows):
    # steps of one, so that a result is the integer itself; the largest sums there are
    codes = codes_of(512, 40, 5)
    codes[0], codes[1] = 127, -127
    x = torch.randint(-127, 128, (rows, 512), generator=generator(6)).float()
    x[:, ::32] = 127.0
    x[0] = 127.0
    got = cpu.linear(x, int8_panels.pack(codes), torch.ones(40))
    assert torch.equal(got.double(), x.double() @ codes.double().T)
    assert got[0, 0] == 512 * 127 * 127


@native
def test_a_row_does_not_depend_on_its_batch(level):
    # more rows than a block of them
    x = torch.randn(530, 1100, generator=generator(8))
    panels, scale = weight_of(1100, 77, 8)
    together = cpu.linear(x, panels, scale)
    for rows in (1, 2, 5, 6, 8, 13, 17, 530):
        assert torch.equal(cpu.linear(x[:rows], panels, scale), together[:rows])
    assert torch.equal(cpu.linear(x[529], panels, scale), together[529])


@native
def test_all_levels_round_alike():
    # half steps, rounding to even, the smallest normal step and less, both zeros
    x = torch.randn(32, generator=generator(9)).repeat(6, 1)
    x[0] = torch.arange(32) - 15.5
    x[0, 31] = 127.0
    x[1] *= 2.0**-120
    x[2] = 2.0**-126
    x[3] = -0.0
    x[4] *= 2.0**120
    panels, scale = int8_panels.pack(codes_of(32, 16, 9)), torch.ones(16)
    want = reference.linear(x, panels, scale)
    for index in range(len(LEVELS)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_native_ops, "level", lambda index=index: index)
            got = cpu.linear(x, panels, scale)
        # one group: an exact sum and one rounding
        assert torch.equal(got, want)


@native
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_what_is_not_finite_stays_in_its_row(level, rows, bad):
    x = torch.randn(rows, 160, generator=generator(10))
    panels, scale = weight_of(160, 35, 10)
    clean = cpu.linear(x, panels, scale)
    x[rows // 2, 131] = bad
    got = cpu.linear(x, panels, scale)
    others = torch.arange(rows) != rows // 2
    assert torch.equal(got[others], clean[others])
    assert got[rows // 2].isnan().all()


@native
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_threads_do_not_change_a_bit(level, threads, rows):
    x = torch.randn(rows, 700, generator=generator(11))
    panels, scale = weight_of(700, 1531, 11)
    results = []
    for count in (1, 2, 3, 4):
        threads(count)
        results.append(cpu.linear(x, panels, scale))
    assert all(torch.equal(results[0], other) for other in results[1:])


@native
def test_every_output_is_written(level, monkeypatch):
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(math.nan))
    for rows in (1, 6, 30):
        panels, scale = weight_of(97, 131, 12)
        assert torch.isfinite(cpu.linear(torch.ones(rows, 97), panels, scale)).all()


@native
@pytest.mark.parametrize("rows", [1, 9, 60])
def test_panels_stand_beside_other_forms(level, rows):
    x = torch.randn(rows, 704, generator=generator(13))
    panels = [Stored(*weight_of(704, size, size)) for size in (90, 16)]
    packed = Stored(
        torch.randint(256, (65, 352), dtype=torch.uint8, generator=generator(14)),
        torch.randint(118, 124, (65, 22), dtype=torch.uint8, generator=generator(15)),
    )
    rows_int8 = Stored(*quantize_rows(torch.randn(30, 704, generator=generator(16))))
    groups = [[panels[0], packed], [rows_int8, panels[1]]]
    got = cpu.linear_many(x, groups)
    want = [torch.cat([cpu.linear(x, *m) for m in group], dim=1) for group in groups]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    expected = reference.linear_many(x, groups)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(got, expected, strict=True))


@native
def test_leading_axes_and_empty_batches_are_kept():
    panels, scale = weight_of(64, 20, 17)
    x = torch.randn(3, 10, 64, generator=generator(18))[:, ::2]
    got = cpu.linear(x, panels, scale)
    assert got.shape == (3, 5, 20)
    torch.testing.assert_close(got, reference.linear(x, panels, scale))
    assert cpu.linear(x[:0], panels, scale).shape == (0, 5, 20)


@native
def test_operands_that_do_not_fit_are_refused():
    panels, scale = weight_of(64, 20, 19)
    with pytest.raises(ShapeError, match="without scales"):
        cpu.linear(torch.randn(3, 64), panels)
    with pytest.raises(ShapeError, match="rows of up to 64"):
        cpu.linear(torch.randn(3, 65), panels, scale)
    with pytest.raises(ShapeError, match="rows of up to 64"):
        cpu.linear(torch.randn(3, 64).double(), panels, scale)
    with pytest.raises(ShapeError, match="weight has shape"):
        cpu.linear(torch.randn(3, 64), panels, torch.ones(33))
    with pytest.raises(ShapeError, match="weight has dtype"):
        cpu.linear(torch.randn(3, 64), panels.view(torch.int8), scale)
    with pytest.raises(ShapeError, match="scale has dtype"):
        cpu.linear(torch.randn(3, 64), panels, scale.double())
