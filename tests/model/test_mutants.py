"""Deliberate faults: each one must be caught by the golden vectors.

The list is the table of common mistakes in model.md section 5, plus the two faults that logits
hardly show. A mutant that survives means the suite has lost its eyes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.core.config import MoEConfig
from moonlet.kernels.kda import reference as kda_reference
from moonlet.kernels.kda.reference import kda_gate, l2_norm
from moonlet.kernels.mla import reference as mla_reference
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.registry import Kernels, resolve
from moonlet.kernels.route_topk.reference import RouteResult, route_topk
from moonlet.kernels.short_conv.reference import short_conv
from moonlet.model.latent_moe import LatentMoE
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from tests.golden_data import count_vectors
from tests.model import golden
from tests.model.golden import max_error, prefill

# a fault in the list moves some logit of the seven-token vector by at least this much
VISIBLE = 1.0


def with_ops(**ops: Callable[..., Any]) -> Kernels:
    return dataclasses.replace(resolve(wanted="reference"), **ops)


def error_of(transformer: Transformer) -> float:
    vectors = golden.expected("tiny_k3").tensors
    return max_error(prefill(transformer, vectors["len7.input_ids"]), vectors["len7.logits"])


def build(kernels: Kernels | None = None) -> Transformer:
    base = golden.shared_model("tiny_k3")
    copy = Transformer(base.config, kernels or resolve(wanted="reference"))
    copy.load_state_dict(base.state_dict())
    return copy.eval()


# ---- KDA ----------------------------------------------------------------------------------------


def kda_with(change: str) -> Callable[..., Any]:
    """The recurrence with one fault in it, bounded gate only."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        bound: float,
        state: Tensor,
        ragged: Ragged,
        emit_at: Tensor | None = None,
    ) -> kda_reference.KDAResult:
        if change == "no dt_bias":
            dt_bias = torch.zeros_like(dt_bias)
        g = kda_gate(z, A_log, dt_bias, bound)
        if change == "clamped softplus":
            g = kda_gate(z, A_log, dt_bias, None).clamp(min=bound)
        if change == "A_log per channel":
            padded = F.pad(A_log, (0, z.shape[-1] - len(A_log)))
            g = bound * torch.sigmoid(padded.exp() * (z + dt_bias))
        scale = 1.0 if change == "unscaled q" else q.shape[-1] ** -0.5
        q, k, beta = l2_norm(q) * scale, l2_norm(k), torch.sigmoid(beta)
        s, outputs = state[0], []
        for t in range(ragged.num_rows):
            decayed = s * g[t].exp()[..., None]
            read_from = s if change == "delta of undecayed state" else decayed
            delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", read_from, k[t]))
            s = decayed + k[t][..., None] * delta[:, None]
            outputs.append(torch.einsum("hkv,hk->hv", s, q[t]))
        return kda_reference.KDAResult(torch.stack(outputs), s[None], None)

    return run


def reversed_taps(x: Tensor, weight: Tensor, *rest: Any) -> Any:
    return short_conv(x, weight.flip(1), *rest)


def silu_gate(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return normed * F.silu(gate)


# ---- MLA ----------------------------------------------------------------------------------------


def scale_of_nope(q: Tensor, pages: LatentPages, *rest: Any) -> Any:
    wide = q.shape[-1]
    factor = (wide / (wide - pages.shared_size)) ** 0.5
    return mla_reference.mla_prefill(q * factor, pages, *rest)


def without_shared_key(q: Tensor, pages: LatentPages, *rest: Any) -> Any:
    rows = pages.rows_GLC.clone()
    rows[..., pages.latent_size :] = 0
    return mla_reference.mla_prefill(q, dataclasses.replace(pages, rows_GLC=rows), *rest)


def without_mla_gate() -> Transformer:
    transformer = build()
    for layer in transformer.layers:
        if not layer.is_kda:
            layer.self_attn._has_gate = False
    return transformer


# ---- MoE ----------------------------------------------------------------------------------------


def unbiased_choice(x: Tensor, weight: Tensor, bias: Tensor, moe: MoEConfig) -> RouteResult:
    return route_topk(x, weight, torch.zeros_like(bias), moe)


def biased_weights(x: Tensor, weight: Tensor, bias: Tensor, moe: MoEConfig) -> RouteResult:
    routed = route_topk(x, weight, bias, moe)
    weights = (routed.scores_TE + bias).gather(1, routed.ids_TA)
    return routed._replace(weights_TA=weights / weights.sum(-1, keepdim=True))


def unnormalised_weights(x: Tensor, weight: Tensor, bias: Tensor, moe: MoEConfig) -> RouteResult:
    return route_topk(x, weight, bias, dataclasses.replace(moe, moe_renormalize=False))


def without_latent_norm() -> Transformer:
    transformer = build()
    for layer in transformer.layers:
        if isinstance(layer.ffn, LatentMoE):
            layer.ffn.routed_expert_norm = None
    return transformer


def high_nibble_first() -> Transformer:
    transformer = build()
    for layer in transformer.layers:
        if isinstance(layer.ffn, LatentMoE):
            experts = layer.ffn.experts
            for w in (experts.w1, experts.w3, experts.w2):
                w.data = w.data.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return transformer


def no_caps(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    return F.silu(gate) * up


def no_up_cap(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def capped_sigmoid(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    capped = beta * torch.tanh(gate / beta)
    return capped * torch.sigmoid(capped) * linear_beta * torch.tanh(up / linear_beta)


# ---- AttnRes ------------------------------------------------------------------------------------


def late_boundaries() -> Transformer:
    transformer = build()
    block = transformer.config.attn_res_block_size
    assert block is not None
    for layer in transformer.layers:
        layer.starts_block = (layer.index + 1) % block == 0
    return transformer


def unnormalised_keys(blocks: list[Tensor], prefix: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not blocks:
        return prefix
    sources = torch.stack([*blocks, prefix])
    return (torch.softmax(sources @ weight, 0)[..., None] * sources).sum(0)


class _Output(Transformer):
    """Ends with something else than the output mix."""

    def end(self, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        raise AssertionError

    def forward(self, tokens_T: Tensor, meta: BatchMeta, state: Any) -> Tensor:
        mixes, calls = self.kernels.attn_res_mix, []

        def record(blocks: list[Tensor], prefix: Tensor, *rest: Any) -> Tensor:
            calls.append((list(blocks), prefix))
            return mixes(blocks, prefix, *rest)

        self.kernels = dataclasses.replace(self.kernels, attn_res_mix=record)
        super().forward(tokens_T, meta, state)
        self.kernels = dataclasses.replace(self.kernels, attn_res_mix=mixes)
        return self.end(*calls[-1])


class _LastBlockOnly(_Output):
    def end(self, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        return prefix


class _PlainSum(_Output):
    def end(self, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        return torch.stack([*blocks, prefix]).sum(0)


def ending_with(kind: type[_Output]) -> Transformer:
    base = golden.shared_model("tiny_k3")
    copy = kind(base.config, resolve(wanted="reference"))
    copy.load_state_dict(base.state_dict())
    return copy.eval()


MUTANTS: dict[str, Callable[[], Transformer]] = {
    **{
        name: lambda name=name: build(with_ops(kda_chunk=kda_with(name)))
        for name in (
            "A_log per channel",
            "clamped softplus",
            "no dt_bias",
            "unscaled q",
            "delta of undecayed state",
        )
    },
    "reversed conv taps": lambda: build(with_ops(short_conv=reversed_taps)),
    "silu output gate": lambda: build(with_ops(gated_rms_norm=silu_gate)),
    "MLA scale of the nope part": lambda: build(with_ops(mla_prefill=scale_of_nope)),
    "shared key part dropped": lambda: build(with_ops(mla_prefill=without_shared_key)),
    "no MLA gate": without_mla_gate,
    "no correction bias": lambda: build(with_ops(route_topk=unbiased_choice)),
    "biased scores as weights": lambda: build(with_ops(route_topk=biased_weights)),
    "no latent norm": without_latent_norm,
    "high nibble first": high_nibble_first,
    "no SiTU caps": lambda: build(with_ops(situ_glu=no_caps)),
    "no up cap": lambda: build(with_ops(situ_glu=no_up_cap)),
    "sigmoid of the capped gate": lambda: build(with_ops(situ_glu=capped_sigmoid)),
    "block boundary one layer late": late_boundaries,
    "unnormalised AttnRes keys": lambda: build(with_ops(attn_res_mix=unnormalised_keys)),
    "no output AttnRes": lambda: ending_with(_LastBlockOnly),
    "plain residual sum at the end": lambda: ending_with(_PlainSum),
}


def test_the_unmutated_build_passes() -> None:
    assert error_of(build()) <= golden.LOGIT_TOLERANCE["tiny_k3"]
    assert error_of(build(with_ops(kda_chunk=kda_with("nothing")))) <= 1e-3
    assert len(MUTANTS) == 21


@pytest.mark.parametrize("name", MUTANTS)
def test_logits_kill(name: str) -> None:
    assert error_of(MUTANTS[name]()) >= VISIBLE
    count_vectors(1)


def test_router_weights_kill_missing_renormalisation() -> None:
    """Logits move by about 2e-3 only, which the tolerance still catches."""
    mutant = build(with_ops(route_topk=unnormalised_weights))
    assert error_of(mutant) > golden.LOGIT_TOLERANCE["tiny_k3"]
    vectors, seen = golden.expected("tiny_k3").tensors, []
    for layer in mutant.layers:
        if isinstance(layer.ffn, LatentMoE):
            layer.ffn.gate.register_forward_hook(lambda _m, _a, out: seen.append(out[1]))
    prefill(mutant, vectors["len7.input_ids"])
    weights = torch.stack(seen).sum(-1)
    assert (weights - vectors["len7.router_weights"].sum(-1)).abs().max() > 1e-2
    count_vectors(1)


def test_small_inputs_kill_the_wrong_latent_epsilon() -> None:
    vectors, mutant = golden.expected("tiny_k3").tensors, build()
    attention = mutant.layers[3].self_attn
    attention.q_a_layernorm.eps = attention.kv_a_layernorm.eps = 1e-5
    x = vectors["small_mla_L3.in"].flatten(0, -2)
    with torch.no_grad():
        out = attention(x, BatchMeta.build([len(x)]), NoState(mutant.config).mla(3))
    wanted = vectors["small_mla_L3.out"].view_as(out)
    assert ((out - wanted).norm() / wanted.norm()).item() > 0.1
    count_vectors(1)
