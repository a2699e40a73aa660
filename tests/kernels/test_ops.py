"""Properties of the operators: backends agree in values and gradients, cuts do not matter."""

import pytest
import torch
from torch import Tensor

from moonlet.core.config import MoEConfig
from moonlet.core.errors import BackendUnavailable, ConfigError, ShapeError
from moonlet.kernels.kda import chunkwise, reference
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.mla.reference import mla_decode, mla_prefill
from moonlet.kernels.moe_experts import grouped
from moonlet.kernels.moe_experts import reference as moe_reference
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.registry import ENGINE_OPERATORS, OPERATORS, resolve
from moonlet.kernels.route_topk.reference import route_topk
from moonlet.kernels.short_conv.reference import short_conv
from moonlet.kernels.situ.reference import situ_glu

BOUNDS = [-5.0, -1.0, None]


def kda_case(
    lens: list[int], bound: float | None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[list[Tensor], Tensor, Ragged]:
    torch.manual_seed(seed)
    heads, key, value = 3, 10, 6
    rows = sum(lens)
    parts = [
        torch.randn(rows, heads, key),
        torch.randn(rows, heads, key),
        torch.randn(rows, heads, value),
        torch.randn(rows, heads, key) * 3,
        torch.randn(rows, heads),
        torch.randn(heads) * 0.5,
        torch.randn(heads, key),
    ]
    state = torch.randn(len(lens), heads, key, value)
    return [p.to(dtype) for p in parts], state.to(dtype), Ragged.build(lens)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("lens", [[1], [37], [64], [5, 1, 70, 33, 1]])
def test_chunked_kda_equals_the_recurrence(lens: list[int], bound: float | None) -> None:
    inputs, state, ragged = kda_case(lens, bound)
    emit = torch.tensor(sorted({0, ragged.num_rows - 1, ragged.num_rows // 2}))
    slow = reference.kda_chunk(*inputs, bound, state, ragged, emit)
    fast = chunkwise.kda_chunk(*inputs, bound, state, ragged, emit)
    assert slow.emitted_EHKV is not None
    assert fast.emitted_EHKV is not None
    for a, b in zip(slow, fast, strict=True):
        assert (a - b).abs().max() <= 2e-5


@pytest.mark.parametrize("bound", BOUNDS)
def test_chunked_kda_gradients_equal_the_recurrence(bound: float | None) -> None:
    inputs, state, ragged = kda_case([21, 3, 40], bound)
    torch.manual_seed(1)
    weight_o, weight_s = torch.randn(64, 3, 6), torch.randn_like(state)
    grads = []
    for run in (reference.kda_chunk, chunkwise.kda_chunk):
        leaves = [x.clone().requires_grad_() for x in [*inputs, state]]
        result = run(*leaves[:-1], bound, leaves[-1], ragged)
        ((result.o_THV * weight_o).sum() + (result.state_SHKV * weight_s).sum()).backward()
        grads.append([leaf.grad for leaf in leaves])
    for slow, fast in zip(*grads, strict=True):
        assert (slow - fast).abs().max() <= 1e-4 * (1 + slow.abs().max())


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_step_equals_the_recurrence_in_its_slots_only(bound: float | None) -> None:
    inputs, state, ragged = kda_case([1, 1], bound)
    slots = torch.tensor([4, 1])
    arena = torch.full((6, *state.shape[1:]), torch.nan)
    arena[slots] = state
    grads = []
    for is_step in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs]
        if is_step:
            o = reference.kda_step(*leaves, bound, arena, slots)
        else:
            o, expected, _ = reference.kda_chunk(*leaves, bound, state, ragged)
        (o * torch.arange(o.numel()).view_as(o)).sum().backward()
        grads.append([o, *(leaf.grad for leaf in leaves)])
    for seen, wanted in zip(*grads, strict=True):
        assert torch.allclose(seen, wanted, rtol=1e-5, atol=1e-6)
    assert torch.allclose(arena[slots], expected, rtol=1e-5, atol=1e-6)
    assert not arena.requires_grad
    assert arena[[0, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize("run", [reference.kda_chunk, chunkwise.kda_chunk])
@pytest.mark.parametrize("cut", [1, 16, 31, 32, 63])
def test_kda_cut_anywhere_continues(run: object, cut: int) -> None:
    inputs, state, ragged = kda_case([64], -5.0)
    whole = run(*inputs, -5.0, state, ragged)
    first = run(*[x[:cut] for x in inputs[:5]], *inputs[5:], -5.0, state, Ragged.build([cut]))
    rest = run(
        *[x[cut:] for x in inputs[:5]],
        *inputs[5:],
        -5.0,
        first.state_SHKV,
        Ragged.build([64 - cut]),
    )
    assert (torch.cat([first.o_THV, rest.o_THV]) - whole.o_THV).abs().max() <= 1e-5
    assert (rest.state_SHKV - whole.state_SHKV).abs().max() <= 1e-5


def recurrence_in_double(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence through the equations, float64, bounded gate."""
    q, k, v, z, beta, a_log, bias = (x.double() for x in inputs)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    alpha = (-5.0 * torch.sigmoid(a_log.exp()[:, None] * (z + bias))).exp()
    s, outputs = state[0].double(), []
    for t in range(q.shape[0]):
        s = s * alpha[t, :, :, None]
        delta = beta[t].sigmoid()[:, None] * (v[t] - (s * k[t, :, :, None]).sum(1))
        s = s + k[t, :, :, None] * delta[:, None]
        outputs.append((s * q[t, :, :, None]).sum(1))
    return torch.stack(outputs), s[None]


def test_near_parallel_keys_keep_their_accuracy() -> None:
    inputs, state, ragged = kda_case([64], -5.0)
    inputs[1] = torch.ones_like(inputs[1]) + 1e-3 * inputs[1]
    inputs[3] = inputs[3] - 30.0
    inputs[4] = torch.full_like(inputs[4], 8.0)
    exact_o, exact_state = recurrence_in_double(inputs, state)
    fast = chunkwise.kda_chunk(*inputs, -5.0, state, ragged)
    assert (fast.o_THV - exact_o).abs().max() <= 1e-4
    assert (fast.state_SHKV - exact_state).abs().max() <= 1e-4


def test_slow_decay_forgets_over_four_thousand_tokens() -> None:
    rows, decay = 4000, 0.9995
    inputs, _, _ = kda_case([rows], -5.0)
    share = torch.tensor(-torch.log(torch.tensor(decay)).item() / 5.0)
    inputs[3] = torch.logit(share).expand_as(inputs[3]).clone()
    inputs[4] = torch.full_like(inputs[4], -80.0)
    inputs[5], inputs[6] = torch.zeros(3), torch.zeros(3, 10)
    state = torch.ones(1, 3, 10, 6)
    result = chunkwise.kda_chunk(*inputs, -5.0, state, Ragged.build([rows]))
    assert result.state_SHKV.mean().item() == pytest.approx(decay**rows, rel=1e-3)


def test_zero_write_strength_and_no_decay_leave_the_state_alone() -> None:
    inputs, state, ragged = kda_case([9], None)
    inputs[3] = torch.full_like(inputs[3], -200.0)
    inputs[4] = torch.full_like(inputs[4], -200.0)
    for run in (reference.kda_chunk, chunkwise.kda_chunk):
        assert torch.allclose(run(*inputs, None, state, ragged).state_SHKV, state)


def test_short_conv_ragged_equals_each_sequence_alone() -> None:
    torch.manual_seed(0)
    lens, weight = [1, 2, 7, 3], torch.randn(5, 4)
    x, carry = torch.randn(13, 5), torch.randn(4, 5, 3)
    whole = short_conv(x, weight, carry, Ragged.build(lens))
    start = 0
    for s, n in enumerate(lens):
        alone = short_conv(x[start : start + n], weight, carry[s : s + 1], Ragged.build([n]))
        assert torch.allclose(whole.y_TC[start : start + n], alone.y_TC, atol=1e-6)
        assert torch.equal(whole.carry_SCW[s], alone.carry_SCW[0])
        start += n


def test_absorbed_decode_equals_expanded_prefill() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([4, 9, 1])
    q, kv_b = torch.randn(3, 2, 8 + 4), torch.randn(2, 8 + 6, 16)
    pages = LatentPages(
        rows_GLC=torch.randn(3, 9, 16 + 4),
        table_SB=torch.arange(3)[:, None],
        lengths_S=lengths,
        latent_size=16,
    )
    decode = mla_decode(q, pages, kv_b)
    prefill = mla_prefill(q, pages, kv_b, Ragged.build([1, 1, 1]), True)
    assert (decode - prefill.o_THV).abs().max() <= 1e-5
    assert prefill.max_score_H is not None
    assert prefill.max_score_H.shape == (2,)


def moe_case(rows: int) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    experts, top, width_in, width = 6, 3, 8, 12
    rules = MoEConfig(num_experts=experts, num_experts_per_token=top, moe_intermediate_size=width)
    x = torch.randn(rows, width_in)
    routed = route_topk(x, torch.randn(experts, width_in), torch.zeros(experts), rules)
    w1, w3 = torch.randn(experts, width, width_in), torch.randn(experts, width, width_in)
    return x, routed.ids_TA, routed.weights_TA, w1, w3, torch.randn(experts, width_in, width)


@pytest.mark.parametrize("rows", [1, 9, 50])
@pytest.mark.parametrize("transform", [None, torch.round])
def test_grouped_experts_equal_the_loop(rows: int, transform: object) -> None:
    case = moe_case(rows)

    def activation(gate: Tensor, up: Tensor) -> Tensor:
        return situ_glu(gate, up, 4.0, 25.0)

    grads = []
    for run in (moe_reference.moe_experts, grouped.moe_experts):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in case]
        out = run(*leaves, activation, transform)
        assert out.dtype == torch.float32
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        grads.append([out, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(grads[0]) == (6 if transform is None else len(grads[1]))
    for slow, fast in zip(*grads, strict=True):
        assert torch.allclose(slow, fast, rtol=1e-4, atol=1e-4)


def test_biased_scores_choose_but_do_not_weigh() -> None:
    torch.manual_seed(0)
    rules = MoEConfig(num_experts=4, num_experts_per_token=2, moe_intermediate_size=8)
    x, weight = torch.randn(5, 8), torch.randn(4, 8)
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0])
    routed = route_topk(x, weight, bias, rules)
    assert (routed.ids_TA == 0).any(-1).all()
    assert torch.allclose(routed.weights_TA.sum(-1), torch.ones(5))
    picked = routed.scores_TE.gather(1, routed.ids_TA)
    assert torch.allclose(routed.weights_TA, picked / picked.sum(-1, keepdim=True))
    ranked = (routed.scores_TE + bias).sort(-1, descending=True).values
    assert torch.equal(routed.cut_T, ranked[:, 2])


def test_registry_refuses_what_it_does_not_have() -> None:
    with pytest.raises(BackendUnavailable, match="kda_chunk has no backend 'magic'"):
        resolve(wanted={"kda_chunk": "magic"})
    # the last two exist, but a model does not call them: naming them would have no effect
    for name in ("nonsense", *ENGINE_OPERATORS):
        with pytest.raises(ConfigError, match=f"names {name}, which a model does not have"):
            resolve(wanted={name: "reference"})
    chosen = {c.op: c.backend for c in resolve(wanted="reference").choices}
    assert set(chosen) == set(OPERATORS) - ENGINE_OPERATORS
    assert set(chosen.values()) == {"reference"}
    assert {c.op: c.backend for c in resolve().choices}["kda_chunk"] != "reference"


@pytest.mark.parametrize("lens", [[], [0], [3, 0]])
def test_empty_sequences_are_refused(lens: list[int]) -> None:
    with pytest.raises(ShapeError, match="at least one row"):
        Ragged.build(lens)


@pytest.mark.parametrize("lens", [[4], [1, 1, 1], [3, 1, 5]])
def test_pad_and_unpad_are_inverse(lens: list[int]) -> None:
    ragged = Ragged.build(lens)
    x = torch.randn(ragged.num_rows, 2)
    padded = ragged.pad(x)
    assert padded.shape == (len(lens), max(lens), 2)
    assert torch.equal(ragged.unpad(padded), x)
