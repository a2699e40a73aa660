"""Native router: every level against float64 and the reference, ties, and thread counts."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moonlet.core.config import MoEConfig
from moonlet.core.errors import ShapeError
from moonlet.kernels import _native, _native_ops
from moonlet.kernels.registry import resolve
from moonlet.kernels.route_topk import cpu, reference
from moonlet.kernels.spec import Spec
from moonlet.testing import tiny_config

pytestmark = pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])

# float32 sums of up to 7168 products of size 1 / sqrt(7168), and exp to 2e-7
TOLERANCE = 1e-6
CASES = [(1, 1, 1, 1), (3, 17, 5, 2), (2, 100, 33, 8), (9, 257, 257, 32), (5, 64, 1024, 16)]


@pytest.fixture(params=range(len(_native.isa_levels())), ids=_native.isa_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_native_ops, "level", lambda: request.param)
    return request.param


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rules(experts: int, top: int, **changes: object) -> MoEConfig:
    config = MoEConfig(num_experts=experts, num_experts_per_token=top, moe_intermediate_size=8)
    return dataclasses.replace(config, **changes)


def case(rows: int, size: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + 10 * size + 1000 * experts)
    x = torch.randn(rows, size, generator=generator)
    weight = 2 * torch.randn(experts, size, generator=generator) / size**0.5
    return x, weight, 0.1 * torch.randn(experts, generator=generator)


def check_selection(seen: reference.RouteResult, bias: Tensor, moe: MoEConfig) -> None:
    """The ids, weights and cut are exactly those of the scores that were returned."""
    top, scores = moe.num_experts_per_token, seen.scores_TE
    ranked = (scores + bias).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(seen.ids_TA, ranked.indices[:, :top])
    if top < moe.num_experts:
        assert torch.equal(seen.cut_T, ranked.values[:, top])
    else:
        assert (seen.cut_T == -math.inf).all()
    weights = scores.gather(1, seen.ids_TA).double()
    if moe.moe_renormalize and top > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(
        seen.weights_TA.double(), weights * moe.routed_scaling_factor, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "experts", "top"), CASES)
def test_equals_the_equation(
    level: int, dtype: torch.dtype, rows: int, size: int, experts: int, top: int
) -> None:
    x, weight, bias = case(rows, size, experts)
    weight = weight.to(dtype)
    for renormalizes, scale in ((True, 2.446), (False, 1.0)):
        moe = rules(experts, top, moe_renormalize=renormalizes, routed_scaling_factor=scale)
        seen = cpu.route_topk(x, weight, bias, moe)
        assert seen.ids_TA.dtype == torch.int64
        exact = torch.sigmoid(x.double() @ weight.double().T)
        assert (seen.scores_TE.double() - exact).abs().max() < TOLERANCE
        check_selection(seen, bias, moe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference_at_the_published_size(level: int, dtype: torch.dtype) -> None:
    x, weight, bias = case(3, 7168, 896)
    weight, moe = weight.to(dtype), rules(896, 16)
    seen, wanted = (f(x, weight, bias, moe) for f in (cpu.route_topk, reference.route_topk))
    check_selection(seen, bias, moe)
    assert (seen.scores_TE - wanted.scores_TE).abs().max() < TOLERANCE
    biased = (wanted.scores_TE + bias).sort(dim=-1, descending=True).values[:, :17]
    # no two of the best lie closer than rounding here, so the ids must agree
    assert -biased.diff().max() > 2 * TOLERANCE
    assert torch.equal(seen.ids_TA, wanted.ids_TA)


def test_ties_go_to_the_lowest_expert(level: int) -> None:
    x = torch.ones(2, 20)
    for experts, top in ((6, 3), (40, 32), (1024, 32)):
        seen = cpu.route_topk(
            x, torch.zeros(experts, 20), torch.zeros(experts), rules(experts, top)
        )
        assert seen.ids_TA.tolist() == [list(range(top))] * 2
    weight, bias = torch.zeros(50, 20), torch.zeros(50)
    bias[[7, 21, 30, 49]] = 1.0
    bias[40] = 2.0
    seen = cpu.route_topk(x, weight, bias, rules(50, 7))
    assert seen.ids_TA[0].tolist() == [40, 7, 21, 30, 49, 0, 1]
    # zeros of both signs are one value
    bias[:] = -0.5
    bias[3] = -1.0
    seen = cpu.route_topk(x, weight, bias, rules(50, 4))
    assert seen.ids_TA[0].tolist() == [0, 1, 2, 4]


def test_large_logits_saturate(level: int) -> None:
    x, bias = torch.tensor([[1.0], [-1.0]]), torch.zeros(3)
    seen = cpu.route_topk(x, torch.tensor([[200.0], [1e30], [-300.0]]), bias, rules(3, 2))
    torch.testing.assert_close(
        seen.scores_TE, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), rtol=0, atol=1e-37
    )


def test_a_row_of_nan_gives_valid_ids_and_stays_alone(level: int) -> None:
    x, weight, bias = case(3, 40, 12)
    clean = cpu.route_topk(x, weight, bias, rules(12, 4))
    x[1, 7] = math.nan
    seen = cpu.route_topk(x, weight, bias, rules(12, 4))
    wanted = reference.route_topk(x, weight, bias, rules(12, 4))
    assert torch.equal(seen.ids_TA[1], wanted.ids_TA[1])
    assert seen.weights_TA[1].isnan().all()
    for part, before in zip(seen, clean, strict=True):
        assert torch.equal(part[[0, 2]], before[[0, 2]])
    bias[5] = math.nan
    seen = cpu.route_topk(x[:1], weight, bias, rules(12, 4))
    wanted = reference.route_topk(x[:1], weight, bias, rules(12, 4))
    assert torch.equal(seen.ids_TA, wanted.ids_TA)


@pytest.mark.parametrize("rows", [2, 5, 70])
def test_a_row_routes_alike_alone_and_in_a_batch(level: int, rows: int) -> None:
    x, weight, bias = case(rows, 130, 50)
    moe = rules(50, 6)
    whole = cpu.route_topk(x, weight, bias, moe)
    for row in {0, rows // 2, rows - 1}:
        alone = cpu.route_topk(x[row : row + 1], weight, bias, moe)
        for part, all_rows in zip(alone, whole, strict=True):
            assert torch.equal(part[0], all_rows[row])


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize(("rows", "size"), [(1, 7168), (70, 512), (200, 32)])
def test_threads_do_not_change_a_bit(rows: int, size: int) -> None:
    x, weight, bias = case(rows, size, 200)
    torch.set_num_threads(1)
    alone = cpu.route_topk(x, weight, bias, rules(200, 16))
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        again = cpu.route_topk(x, weight, bias, rules(200, 16))
        assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))


def test_no_rows_and_strided_rows() -> None:
    x, weight, bias = case(4, 24, 9)
    moe = rules(9, 2)
    assert [len(part) for part in cpu.route_topk(x[:0], weight, bias, moe)] == [0] * 4
    strided = torch.stack([x, x], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    for seen, wanted in zip(
        cpu.route_topk(strided, weight, bias, moe),
        cpu.route_topk(x, weight, bias, moe),
        strict=True,
    ):
        assert torch.equal(seen, wanted)


REFUSED = [
    (rules(2048, 4), "1024"),
    (rules(64, 33), "32"),
    (rules(8, 2, moe_router_activation_func="softmax"), "softmax"),
    (rules(8, 2, num_expert_group=4, topk_group=2), "group"),
]


@pytest.mark.parametrize(("moe", "reason"), REFUSED)
def test_rules_it_does_not_have_are_refused(moe: MoEConfig, reason: str) -> None:
    config = tiny_config(moe=moe)
    spec = Spec(device=torch.device("cpu"), config=config, is_inference=True)
    assert reason in str(cpu.refusal(spec))
    chosen = resolve(config=config, is_inference=True)
    assert chosen.backend("route_topk") == "reference"
    with pytest.raises(ShapeError, match=reason):
        cpu.route_topk(torch.zeros(1, 4), torch.zeros(moe.num_experts, 4), torch.zeros(4), moe)


def test_it_serves_inference_in_float32_only() -> None:
    assert resolve(config=tiny_config(), is_inference=True).backend("route_topk") == "cpu"
    assert resolve(config=tiny_config()).backend("route_topk") == "reference"


def test_refuses_what_the_library_would_misread() -> None:
    x, weight, bias = case(2, 8, 4)
    moe = rules(4, 2)
    with pytest.raises(ShapeError, match="x has dtype"):
        cpu.route_topk(x.double(), weight, bias, moe)
    with pytest.raises(ShapeError, match="weight has dtype"):
        cpu.route_topk(x, weight.half(), bias, moe)
    with pytest.raises(ShapeError, match="weight has shape"):
        cpu.route_topk(x, weight[:, :7], bias, moe)
    with pytest.raises(ShapeError, match="bias has shape"):
        cpu.route_topk(x, weight, bias[:3], moe)
