import math

import pytest
import torch

from moonlet.core.errors import BackendError, ShapeError
from moonlet.kernels import _native, _native_ops, int8_groups, mxfp8
from moonlet.kernels.moe_mxfp4 import cpu, reference
from moonlet.kernels.mxfp4 import Packed, pack
from moonlet.kernels.situ.gated import GatedActivation
from moonlet.kernels.situ.reference import situ_glu, swiglu

LEVELS = _native.isa_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="native kernels are not built")
SITU = GatedActivation("situ", lambda g, u: situ_glu(g, u, 4.0, 25.0), 4.0, 25.0)
UNCAPPED = GatedActivation("situ", lambda g, u: situ_glu(g, u, 4.0, None), 4.0, None)
SILU = GatedActivation("silu", swiglu)
# rows, top_k, experts, size_in, width
CASES = (
    (1, 2, 4, 64, 64),
    (3, 2, 5, 96, 160),
    (17, 4, 8, 128, 32),
    (40, 1, 1, 256, 96),
    (100, 2, 2, 160, 352),
    (7, 3, 6, 32, 64),
)
# so many rows that experts are multiplied through panels: whole and broken blocks, tiles, batches
MANY = (
    (60, 1, 1, 96, 160),
    (130, 2, 3, 160, 352),
    (75, 2, 2, 352, 96),
    (300, 1, 1, 64, 32),
    (64, 2, 2, 608, 1056),
)


def packed(generator, *shape):
    *lead, size = shape
    codes = torch.randint(0, 256, (*lead, size // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(118, 124, (*lead, size // 32), dtype=torch.uint8, generator=generator)
    return Packed(codes, scale)


def problem(rows, top_k, experts, size_in, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = (
        packed(generator, experts, width, size_in),
        packed(generator, experts, width, size_in),
        packed(generator, experts, size_in, width),
    )
    z = torch.randn(rows, size_in, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])
    return z, ids, torch.rand(rows, top_k, generator=generator), *weights


def error_ratio(got, want):
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("activation", [SITU, UNCAPPED, SILU], ids=["situ", "uncapped", "silu"])
def test_it_equals_the_reference_in_float64(level, case, activation):
    z, *rest = problem(*case)
    got = cpu.moe_mxfp4(z, *rest, activation)
    # activations are computed in float32 by both
    want = reference.moe_mxfp4(z, *rest, activation)
    assert error_ratio(got, want) < 3e-6


@pytest.mark.parametrize("mode", ["mxfp8", "mxfp8-floor", "int8"])
def test_modes_round_the_inputs_of_both_products(level, mode):
    arguments = (*problem(30, 2, 3, 96, 160, seed=3), SITU)
    got = cpu.moe_mxfp4(*arguments, mode)
    errors = {m: error_ratio(got, reference.moe_mxfp4(*arguments, m)) for m in reference.MODES}
    own = errors.pop(mode)
    # a hidden value at a rounding border may fall to either side; its step is one of many terms
    assert own < 5e-3
    assert own < min(errors.values()) / 4


@pytest.mark.parametrize("case", MANY, ids=str)
def test_int8_products_of_many_rows(level, case):
    arguments = (*problem(*case, seed=6), SITU)
    got = cpu.moe_mxfp4(*arguments, "int8")
    want = reference.moe_mxfp4(*arguments, "int8")
    # as above; the median is of outputs without a hidden value at a border
    assert error_ratio(got, want) < 5e-3
    assert float((got - want).abs().median() / want.abs().max()) < 1e-6


def exact_problem(rows, size_in, width, w3_FR, w2_RF):
    """One expert whose hidden values are exact: integers, and a gate that opens fully."""
    gate = torch.zeros(1, width, size_in // 2, dtype=torch.uint8)
    gate[0, :, 0] = 1 + torch.arange(width) % 7
    unit = torch.full((1, width, size_in // 32), 127, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(8)
    z = torch.randint(-127, 128, (rows, size_in), generator=generator).float()
    # the step of each group is one
    z[:, ::32] = 127.0
    ids, weights = torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1)
    return z, ids, weights, Packed(gate, unit), w3_FR, w2_RF, SILU, "int8"


@pytest.mark.parametrize(("rows", "size_in", "width"), [(61, 96, 160), (25, 608, 544)])
def test_int8_products_are_exact(level, rows, size_in, width):
    generator = torch.Generator().manual_seed(7)
    w3, w2 = packed(generator, 1, width, size_in), packed(generator, 1, size_in, width)
    w3.scale.copy_(torch.randint(126, 129, w3.scale.shape, generator=generator))
    z, *rest = exact_problem(rows, size_in, width, w3, w2)
    got = cpu.moe_mxfp4(z, *rest)
    # both round the same hidden values; what is left are float32 sums, of groups or of all elements
    tolerance = 3e-7 if level == "vnni" else 3e-6
    assert error_ratio(got, reference.moe_mxfp4(z.double(), *rest)) < tolerance


@pytest.mark.parametrize("exponent", [-40, 0])
def test_every_code_at_every_scale_in_integers(level, exponent):
    # output r has the scale r, and row t reads code t of it through hidden value t
    w3 = torch.zeros(1, 32, 256, dtype=torch.uint8)
    w3[0, :, 32:64] = torch.eye(32) * 2
    codes = (torch.arange(256)[:, None] + torch.arange(32)) % 16
    scale = torch.arange(256).clamp(max=252).to(torch.uint8)[None, :, None]
    w2 = Packed(pack(codes.to(torch.uint8))[None], scale)
    w3 = Packed(pack(w3), torch.full((1, 32, 8), 127, dtype=torch.uint8))
    z, *rest = exact_problem(32, 256, 32, w3, w2)
    z[:, 32:64] = torch.eye(32) * 127.0 * 2.0**exponent
    got = cpu.moe_mxfp4(z, *rest)
    want = reference.moe_mxfp4(z.double(), *rest)
    # with the larger values the last scales leave float32, for both
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-37)
    assert len(want.unique()) > 500


@pytest.mark.parametrize("mode", ["bf16", "int8"])
def test_a_row_that_is_not_finite_or_zero_stays_alone(level, mode):
    z, *rest = problem(130, 2, 3, 160, 352, seed=9)
    clean = cpu.moe_mxfp4(z, *rest, SITU, mode)
    z[5, 40], z[77, 0], z[100] = math.inf, math.nan, 0.0
    got = cpu.moe_mxfp4(z, *rest, SITU, mode)
    others = torch.ones(130, dtype=torch.bool)
    others[[5, 77, 100]] = False
    assert torch.equal(got[others], clean[others])
    assert got[77].isnan().all()
    # an infinite input may saturate the activation where nothing rounds it
    assert mode == "bf16" or got[5].isnan().all()
    assert (got[100] == 0).all()


def test_every_code_at_every_scale(level):
    # expert e has the scale e; row f of its gate holds one code, and output r reads hidden value r.
    # above 252 the largest magnitudes leave float32
    scales = torch.arange(253, dtype=torch.uint8)
    codes = (torch.arange(32) % 16 * 17).to(torch.uint8)
    w1 = Packed(codes[:, None].expand(253, 32, 16).contiguous(),
                scales[:, None, None].expand(253, 32, 1).contiguous())  # fmt: skip
    unit = torch.full((253, 32, 1), 127, dtype=torch.uint8)
    w3 = Packed(torch.full((253, 32, 16), 0x22, dtype=torch.uint8), unit)
    w2 = Packed(pack((torch.eye(32) * 2).to(torch.uint8)).expand(253, 32, 16).contiguous(), unit)
    z = torch.zeros(253, 32)
    z[:, 0] = 2.0**-40
    ids, weights = scales.long()[:, None], torch.ones(253, 1)
    got = cpu.moe_mxfp4(z, ids, weights, w1, w3, w2, SILU)
    want = reference.moe_mxfp4(z.double(), ids, weights, w1, w3, w2, SILU)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-37)
    assert len(want.unique()) > 500


def test_empty_experts_and_all_rows_to_one_expert(level):
    z, ids, weights, *matrices = problem(50, 1, 6, 64, 96)
    for target in (0, 5):
        everywhere = torch.full_like(ids, target)
        got = cpu.moe_mxfp4(z, everywhere, weights, *matrices, SITU)
        want = reference.moe_mxfp4(z, everywhere, weights, *matrices, SITU)
        assert error_ratio(got, want) < 3e-6
    empty = cpu.moe_mxfp4(z[:0], ids[:0], weights[:0], *matrices, SITU)
    assert empty.shape == (0, 64)


@pytest.mark.parametrize("mode", ["mxfp8", "int8"])
@pytest.mark.parametrize("case", [CASES[2], CASES[4], MANY[1]], ids=str)
def test_threads_do_not_change_a_bit(level, threads, case, mode):
    arguments = problem(*case)
    results = []
    for count in (1, 2, 3, 4):
        threads(count)
        results.append(cpu.moe_mxfp4(*arguments, SITU, mode))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.fixture
def scratch(monkeypatch):
    """Poison what is allocated for a call, and return the list of it."""
    made, empty = [], torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        fresh = empty(self, *shape, **options)
        made.append(fresh.fill_(math.nan if fresh.is_floating_point() else -(1 << 40)))
        return fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: torch.full_like(x, math.nan))
    return made


@pytest.mark.parametrize("case", [(9, 2, 4, 96, 160), MANY[1], (40, 2, 3, 96, 160)], ids=str)
@pytest.mark.parametrize("mode", ["bf16", "int8"])
def test_scratch_and_output_may_hold_anything(level, case, mode, request):
    z, ids, *rest = problem(*case)
    if case[0] == 40:
        # the last expert gets few rows, the others many
        ids[3:] = torch.tensor([0, 1])
    clean = cpu.moe_mxfp4(z, ids, *rest, SITU, mode)
    request.getfixturevalue("scratch")
    assert torch.equal(clean, cpu.moe_mxfp4(z, ids, *rest, SITU, mode))


@pytest.mark.parametrize("rows", [1, 3, 60])
def test_rows_are_multiplied_in_integers_where_the_level_can(level, scratch, rows):
    cpu.moe_mxfp4(*problem(rows, 1, 1, 96, 160), SITU, "int8")
    codes = scratch[-1]
    assert codes.numel() == rows * (96 + 160) // 32 * 10
    assert codes.isnan().all() == (level != "vnni")


def test_what_does_not_fit_is_refused():
    z, ids, weights, *matrices = problem(3, 2, 4, 64, 64)
    with pytest.raises(BackendError, match="status 1"):
        cpu.moe_mxfp4(z, ids + 4, weights, *matrices, SITU)
    with pytest.raises(ShapeError, match="float32"):
        cpu.moe_mxfp4(z.double(), ids, weights, *matrices, SITU)
    with pytest.raises(ShapeError, match="w2"):
        cpu.moe_mxfp4(z, ids, weights, *matrices[:2], problem(1, 1, 4, 64, 96)[5], SITU)
    with pytest.raises(ShapeError, match="multiples"):
        cpu.moe_mxfp4(z[:, :40], ids, weights, *matrices, SITU)


@pytest.mark.parametrize("rule", mxfp8.RULES)
def test_native_mxfp8_rounding_gives_the_same_bits(level, rule):
    generator = torch.Generator().manual_seed(17)
    x = torch.randn(64, 160, generator=generator) * 2.0 ** torch.randint(
        -140, 120, (64, 160), generator=generator
    )
    x[:8] = x[:8].sign() * 2.0 ** torch.randint(-120, 100, (8, 160), generator=generator)
    x[8] = 0.0
    x[9, 3] = math.inf
    x[10, 40] = math.nan
    got = mxfp8.fake_quantize(x, rule, backend="cpu")
    want = mxfp8.fake_quantize(x, rule, backend="reference")
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_native_int8_rounding_gives_the_same_bits(level):
    x = torch.randn(64, 160, generator=torch.Generator().manual_seed(2)) * 37
    x[3] = 0.0
    # steps whose inverse leaves float32, beside zeros; and the smallest that are kept
    x[4] *= 1e-38
    x[4, ::2] = 0.0
    x[5] *= 1e-37
    out = torch.empty_like(x)
    _native_ops.call("round_groups", x, out, x.numel(), 3)
    assert torch.equal(out, int8_groups.fake_quantize(x))
    assert (out[4] == 0).all()
    assert (out[5] != 0).any()
