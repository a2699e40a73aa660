"""Training backends against their references: outputs, states and every gradient."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from moonlet.core.config import MoEConfig
from moonlet.core.errors import ShapeError
from moonlet.kernels import _native
from moonlet.kernels.attn_res import native as native_attn_res
from moonlet.kernels.attn_res import reference as attn_res
from moonlet.kernels.kda import native as native_kda
from moonlet.kernels.kda import reference as kda
from moonlet.kernels.mla import blockwise
from moonlet.kernels.mla import reference as mla
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.moe_experts import reference as moe_experts
from moonlet.kernels.moe_experts import sorted as sorted_experts
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.rms_norm import native as native_norm
from moonlet.kernels.rms_norm import reference as norm
from moonlet.kernels.route_topk.reference import route_topk
from moonlet.kernels.short_conv import native as native_conv
from moonlet.kernels.short_conv import reference as conv
from moonlet.kernels.situ import native as native_situ
from moonlet.kernels.situ import reference as situ

needs_native = pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])

Shape = tuple[int, ...]


def leaves(shapes: Sequence[Shape], seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def error(seen: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    scale = float(expected.detach().abs().max()) + 1e-12
    return float((seen.detach().double() - expected.detach().double()).abs().max()) / scale


def compare(
    fast: Callable[..., tuple[Tensor, ...]],
    slow: Callable[..., tuple[Tensor, ...]],
    shapes: Sequence[Shape],
    tolerance: float = 3e-5,
    seed: int = 0,
) -> None:
    """Run ``fast`` in float32 and ``slow`` in float64 on equal inputs; compare all results."""
    inputs32 = leaves(shapes, seed, torch.float32)
    inputs64 = leaves(shapes, seed, torch.float64)
    results = []
    for function, inputs in ((fast, inputs32), (slow, inputs64)):
        outputs = function(*inputs)
        generator = torch.Generator().manual_seed(seed + 1)
        loss = sum(
            (o * torch.randn(o.shape, generator=generator).to(o.dtype)).sum() for o in outputs
        )
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        results.append((outputs, gradients))
    (fast_outputs, fast_gradients), (slow_outputs, slow_gradients) = results
    for index, (seen, expected) in enumerate(zip(fast_outputs, slow_outputs, strict=True)):
        assert error(seen, expected) < tolerance, f"output {index}"
    for index, (seen, expected) in enumerate(zip(fast_gradients, slow_gradients, strict=True)):
        assert (seen is None) == (expected is None), f"gradient {index}"
        if seen is not None:
            assert error(seen, expected) < tolerance, f"gradient {index}"


@pytest.fixture(params=_native.isa_levels() or ["none"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction-set level that runs here."""
    from moonlet.kernels import _native_training

    index = _native.isa_levels().index(request.param) if request.param != "none" else 0
    monkeypatch.setattr(_native_training, "_level", lambda: index)
    return request.param


@needs_native
@pytest.mark.parametrize("cap", [25.0, None])
def test_situ(level: str, cap: float | None) -> None:
    compare(
        lambda g, u: (native_situ.situ_glu(6 * g, 30 * u, 4.0, cap),),
        lambda g, u: (_situ64(6 * g, 30 * u, 4.0, cap),),
        [(7, 19), (7, 19)],
    )


def _situ64(gate: Tensor, up: Tensor, beta: float, cap: float | None) -> Tensor:
    capped = up if cap is None else cap * torch.tanh(up / cap)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * capped


@needs_native
def test_situ_keeps_relative_precision_near_zero() -> None:
    up = torch.tensor([1e-3, -1e-5, 1e-7])
    seen = native_situ.situ_glu(torch.ones(3), up, 4.0, 25.0)
    expected = _situ64(torch.ones(3, dtype=torch.float64), up.double(), 4.0, 25.0)
    assert ((seen - expected) / expected).abs().max() < 1e-6


@needs_native
def test_rms_norm(level: str) -> None:
    compare(
        lambda x, w: (native_norm.rms_norm(x, w, 1e-5),),
        lambda x, w: (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w,),
        [(11, 48), (48,)],
    )
    x, w = torch.randn(5, 48), torch.randn(48)
    assert error(native_norm.rms_norm(x, w, 1e-5), norm.rms_norm(x, w, 1e-5)) < 1e-6


@needs_native
def test_gated_rms_norm(level: str) -> None:
    def slow(x: Tensor, w: Tensor, gate: Tensor) -> tuple[Tensor]:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w
        return (normed * torch.sigmoid(gate),)

    compare(
        lambda x, w, gate: (native_norm.gated_rms_norm(x, w, gate, 1e-5),),
        slow,
        [(11, 3, 32), (32,), (11, 3, 32)],
    )


@needs_native
@pytest.mark.parametrize("num_sources", [2, 5, 18])
def test_attn_res_mix(level: str, num_sources: int) -> None:
    def slow(w: Tensor, *sources: Tensor) -> tuple[Tensor]:
        stacked = torch.stack(sources)
        scores = (stacked * w).sum(-1) * torch.rsqrt(stacked.square().mean(-1) + 1e-5)
        return ((torch.softmax(scores, 0)[..., None] * stacked).sum(0),)

    shapes = [(32,), *[(9, 32)] * num_sources]
    compare(lambda w, *s: (native_attn_res.attn_res_mix(s[:-1], s[-1], w, 1e-5),), slow, shapes)
    w, *sources = [x.detach() for x in leaves(shapes, 3, torch.float32)]
    seen = native_attn_res.attn_res_mix(sources[:-1], sources[-1], w, 1e-5)
    assert error(seen, attn_res.attn_res_mix(sources[:-1], sources[-1], w, 1e-5)) < 1e-5


@needs_native
@pytest.mark.parametrize("seq_lens", [(1, 2, 3, 9), (40,)])
def test_short_conv(level: str, seq_lens: tuple[int, ...]) -> None:
    ragged = Ragged.build(seq_lens)
    carry = torch.randn(len(seq_lens), 32, 3, generator=torch.Generator().manual_seed(5))

    def fast(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (native_conv.short_conv(x, w, carry, ragged).y_TC,)

    def slow(x: Tensor, w: Tensor) -> tuple[Tensor]:
        outputs = []
        for rows, before in zip(x.split(list(seq_lens)), carry.double(), strict=True):
            padded = torch.cat([before.T, rows])
            y = sum(w[:, j] * padded[j : j + len(rows)] for j in range(4))
            outputs.append(torch.nn.functional.silu(y))
        return (torch.cat(outputs),)

    compare(fast, slow, [(sum(seq_lens), 32), (32, 4)])
    x, w = torch.randn(sum(seq_lens), 32), torch.randn(32, 4)
    seen = native_conv.short_conv(x, w, carry, ragged)
    expected = conv.short_conv(x, w, carry, ragged)
    assert torch.equal(seen.carry_SCW, expected.carry_SCW)
    assert error(seen.y_TC, expected.y_TC) < 1e-6


def _kda64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt: Tensor,
    state: Tensor,
    seq_lens: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The recurrence of the reference in float64."""
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + kda.L2_EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + kda.L2_EPS)
    g = -5.0 * torch.sigmoid(a_log.exp()[:, None] * (z + dt))
    outputs, finals, row = [], [], 0
    for s, length in enumerate(seq_lens):
        S = state[s]
        for t in range(row, row + length):
            S = S * g[t].exp()[..., None]
            delta = torch.sigmoid(b[t])[:, None] * (v[t] - (S * k[t][..., None]).sum(1))
            S = S + k[t][..., None] * delta[:, None]
            outputs.append((S * q[t][..., None]).sum(1))
        finals.append(S)
        row += length
    return torch.stack(outputs), torch.stack(finals)


@needs_native
@pytest.mark.parametrize("seq_lens", [(1,), (32, 5), (33, 70, 16)])
@pytest.mark.parametrize(("key", "value"), [(16, 32), (32, 16), (48, 48)])
def test_kda(level: str, seq_lens: tuple[int, ...], key: int, value: int) -> None:
    ragged, rows, heads = Ragged.build(seq_lens), sum(seq_lens), 2

    def fast(*inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, z, b, a_log, dt, state = inputs
        result = native_kda.kda_chunk(q, k, v, z, b, a_log, dt, -5.0, state, ragged)
        return result.o_THV, result.state_SHKV

    shapes = [
        *[(rows, heads, key)] * 2,
        (rows, heads, value),
        (rows, heads, key),
        (rows, heads),
        (heads,),
        (heads, key),
        (len(seq_lens), heads, key, value),
    ]
    compare(fast, lambda *x: _kda64(*x, seq_lens=seq_lens), shapes, tolerance=2e-4)


@needs_native
def test_kda_survives_the_strongest_decay() -> None:
    ragged = Ragged.build([64])
    q, k, v, z = (torch.randn(64, 1, 16) for _ in range(4))
    inputs = [q, k, v, torch.full_like(z, 30.0), torch.randn(64, 1), torch.ones(1)]
    inputs = [x.requires_grad_() for x in (*inputs, torch.zeros(1, 16))]
    result = native_kda.kda_chunk(*inputs, -5.0, torch.randn(1, 1, 16, 16), ragged)
    result.o_THV.sum().backward()
    assert torch.isfinite(result.o_THV).all()
    assert all(torch.isfinite(x.grad).all() for x in inputs)


@needs_native
def test_kda_emits_states_like_the_reference() -> None:
    ragged = Ragged.build([40])
    shapes = [(40, 2, 16)] * 4 + [(40, 2), (2,), (2, 16)]
    inputs = [x.detach() for x in leaves(shapes, 0, torch.float32)]
    state, rows = torch.randn(1, 2, 16, 16), torch.tensor([3, 39])
    seen = native_kda.kda_chunk(*inputs, -5.0, state, ragged, rows).emitted_EHKV
    expected = kda.kda_chunk(*inputs, -5.0, state, ragged, rows).emitted_EHKV
    assert seen is not None
    assert expected is not None
    assert error(seen, expected) < 1e-4


def test_native_kda_refuses_an_unbounded_gate() -> None:
    ragged = Ragged.build([4])
    shapes = [(4, 1, 16)] * 4 + [(4, 1), (1,), (1, 16)]
    with pytest.raises(ShapeError, match="gate bound"):
        native_kda.kda_chunk(
            *leaves(shapes, 0, torch.float32), None, torch.zeros(1, 1, 16, 16), ragged
        )


@needs_native
def test_native_operators_refuse_other_dtypes() -> None:
    with pytest.raises(ShapeError, match="float32"):
        native_norm.rms_norm(torch.zeros(2, 16, dtype=torch.float64), torch.ones(16), 1e-5)


@needs_native
def test_native_operators_refuse_shapes_the_library_would_read_past() -> None:
    x, w, rows = torch.zeros(2, 32), torch.ones(16), Ragged.build([2])
    kda_inputs = [torch.zeros(2, 1, 16)] * 4 + [torch.zeros(2, 1), torch.zeros(1)]
    state = torch.zeros(1, 1, 16, 16)
    calls = {
        "weight": lambda: native_norm.rms_norm(x, w, 1e-5),
        "gate": lambda: native_norm.gated_rms_norm(x, torch.ones(32), x[:1], 1e-5),
        "up": lambda: native_situ.situ_glu(x, x[:1], 4.0, 25.0),
        "block": lambda: native_attn_res.attn_res_mix([x[:1]], x, torch.ones(32), 1e-5),
        "carry": lambda: native_conv.short_conv(x, x.new_ones(32, 4), x.new_ones(1, 16, 3), rows),
        "dt_bias": lambda: native_kda.kda_chunk(*kda_inputs, torch.zeros(1, 8), -5.0, state, rows),
        "q": lambda: native_kda.kda_chunk(
            *kda_inputs, torch.zeros(1, 16), -5.0, state, Ragged.build([3])
        ),
    }
    for name, run in calls.items():
        with pytest.raises(ShapeError, match=f"^{name} has shape"):
            run()


@pytest.mark.parametrize(
    ("seq_lens", "starts"), [((5, 200, 129, 1), (0, 3, 0, 2)), ((3,), (0,)), ((128,), (0,))]
)
def test_blockwise_mla(seq_lens: tuple[int, ...], starts: tuple[int, ...]) -> None:
    ragged, count = Ragged.build(seq_lens), len(seq_lens)
    lengths = torch.tensor([n + s for n, s in zip(seq_lens, starts, strict=True)])
    longest = int(lengths.max())
    maxima = []

    def run(module: object, q: Tensor, rows_GLC: Tensor, kv_b: Tensor) -> tuple[Tensor]:
        pages = LatentPages(
            rows_GLC=rows_GLC,
            table_SB=torch.arange(count)[:, None],
            lengths_S=lengths,
            latent_size=8,
        )
        result = module.mla_prefill(q, pages, kv_b, ragged, True)  # type: ignore[attr-defined]
        maxima.append(result.max_score_H)
        return (result.o_THV,)

    compare(
        lambda *x: run(blockwise, *x),
        lambda *x: run(mla, *x),
        [(sum(seq_lens), 2, 12), (count, longest, 12), (2, 18, 8)],
    )
    assert error(maxima[0], maxima[1]) < 1e-5


@pytest.mark.parametrize("num_rows", [1, 23])
def test_sorted_experts(num_rows: int) -> None:
    moe = MoEConfig(num_experts=6, num_experts_per_token=2, moe_intermediate_size=8)
    x = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(1))
    gate = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    ids = route_topk(x, gate, torch.zeros(6), moe).ids_TA

    def activation(gate: Tensor, up: Tensor) -> Tensor:
        return situ.situ_glu(gate, up, 4.0, 25.0)

    def run(module: object, *inputs: Tensor) -> tuple[Tensor]:
        # the routing weights are float32 in every model dtype
        z, p, *matrices = (x.float() for x in inputs)
        return (
            module.moe_experts(z, ids, p, *matrices, activation, torch.tanh),  # type: ignore[attr-defined]
        )

    compare(
        lambda *x: run(sorted_experts, *x),
        lambda *x: run(moe_experts, *x),
        [(num_rows, 4), (num_rows, 2), (6, 8, 4), (6, 8, 4), (6, 4, 8)],
    )
