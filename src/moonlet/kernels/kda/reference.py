"""Kimi Delta Attention as the token recurrence (model.md section 3.3; report section 2.1).

Per head, with state S of K x V in float32::

    S <- diag(exp(g)) S
    d  = beta (v - S^T k)
    S <- S + k d^T
    o  = S^T q

Decay first, delta against the decayed state, read from the updated state. The forward operators
take raw inputs: keys and queries before the L2 norm, gate and beta before their activation.

Letters: T packed rows, S sequences, H heads, K key width, V value width, E emitted rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.kernels.ragged import Ragged

__all__ = ["KDAResult", "kda_chunk", "kda_gate", "kda_step", "l2_norm"]

L2_EPS = 1e-6


class KDAResult(NamedTuple):
    """Output, final state and the states after the asked-for rows (all states float32)."""

    o_THV: Tensor
    state_SHKV: Tensor
    emitted_EHKV: Tensor | None


def kda_gate(
    z_THK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float | None
) -> Tensor:
    """Return the log decay g, float32, from the raw gate projection.

    K3: ``lower_bound * sigmoid(exp(A_log) (z + dt_bias))``, so g lies in (lower_bound, 0).
    Kimi-Linear (no lower bound): ``-exp(A_log) softplus(z + dt_bias)``.
    """
    logits_THK = z_THK.float() + dt_bias_HK
    scale_H1 = A_log_H.exp()[:, None]
    if lower_bound is None:
        return -scale_H1 * F.softplus(logits_THK)
    return lower_bound * torch.sigmoid(scale_H1 * logits_THK)


def l2_norm(x: Tensor) -> Tensor:
    """Divide by the L2 norm of the last axis in float32; epsilon is added inside the root."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + L2_EPS)


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One recurrence step on ``[S, H, ...]``; returns output and new state, float32."""
    decayed = state * g.exp()[..., None]
    delta = beta[..., None] * (v - torch.einsum("shkv,shk->shv", decayed, k))
    updated = decayed + k[..., None] * delta[..., None, :]
    return torch.einsum("shkv,shk->shv", updated, q), updated


def kda_step(
    q_SHK: Tensor,
    k_SHK: Tensor,
    v_SHV: Tensor,
    z_SHK: Tensor,
    beta_logits_SH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    state_GHKV: Tensor,
    slots_S: Tensor,
) -> Tensor:
    """One decode step of S sequences whose states lie in an arena of G slots.

    Args:
        q_SHK: Queries after the short convolution, before the L2 norm.
        k_SHK: Keys, likewise.
        v_SHV: Values after the short convolution.
        z_SHK: Raw gate projection (``f_b`` output).
        beta_logits_SH: Raw write strength (``b_proj`` output).
        A_log_H: float32 log scale per head.
        dt_bias_HK: float32 gate bias.
        lower_bound: Gate bound, or None for the softplus gate.
        state_GHKV: float32. Slots ``slots_S`` are modified in place, no other slot is read. It is
            memory: no gradient flows into it or through it.
        slots_S: int64, distinct: where each sequence's state lies.

    Returns:
        Output ``[S, H, V]`` in the dtype of ``v_SHV``, read from the new states.
    """
    scale = q_SHK.shape[-1] ** -0.5
    o, state_SHKV = _step(
        l2_norm(q_SHK) * scale,
        l2_norm(k_SHK),
        v_SHV.float(),
        kda_gate(z_SHK, A_log_H, dt_bias_HK, lower_bound),
        torch.sigmoid(beta_logits_SH.float()),
        state_GHKV.index_select(0, slots_S),
    )
    state_GHKV.index_copy_(0, slots_S, state_SHKV.detach())
    return o.to(v_SHV.dtype)


def kda_chunk(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    beta_logits_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    state_SHKV: Tensor,
    ragged: Ragged,
    emit_at_E: Tensor | None = None,
) -> KDAResult:
    """Run every sequence through the recurrence, token by token.

    Args:
        q_THK: Queries as in `kda_step`, packed rows.
        k_THK: Keys.
        v_THV: Values.
        z_THK: Raw gate projection.
        beta_logits_TH: Raw write strength.
        A_log_H: float32 log scale per head.
        dt_bias_HK: float32 gate bias.
        lower_bound: Gate bound, or None for the softplus gate.
        state_SHKV: float32 states before the first row, not modified.
        ragged: Sequence borders.
        emit_at_E: Packed rows after which the state is wanted, or None.

    Returns:
        Output in the dtype of ``v_THV``, final states, emitted states in the order asked for.
    """
    scale = q_THK.shape[-1] ** -0.5
    q, k, v = l2_norm(q_THK) * scale, l2_norm(k_THK), v_THV.float()
    g = kda_gate(z_THK, A_log_H, dt_bias_HK, lower_bound)
    beta = torch.sigmoid(beta_logits_TH.float())
    states = list(state_SHKV.unbind(0))
    outputs: list[Tensor] = []
    after_row: list[Tensor] = []
    for s, (start, length) in enumerate(
        zip(ragged.starts_S.tolist(), ragged.seq_lens, strict=True)
    ):
        state = states[s][None]
        for t in range(start, start + length):
            row = slice(t, t + 1)
            o, state = _step(q[row], k[row], v[row], g[row], beta[row], state)
            outputs.append(o)
            if emit_at_E is not None:
                after_row.append(state)
        states[s] = state[0]
    emitted = None
    if emit_at_E is not None:
        emitted = torch.cat(after_row)[emit_at_E]
    return KDAResult(torch.cat(outputs).to(v_THV.dtype), torch.stack(states), emitted)
