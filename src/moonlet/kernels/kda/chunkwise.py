"""Kimi Delta Attention in chunks of C rows (model.md section 3.3, "Chunkwise form").

Within a chunk, with G the inclusive cumulative log decay::

    A_ij = beta_i <k_i exp(G_i - G_j), k_j>  (i > j)      X = (I + A)^-1
    U = X (beta V)      W = X (beta K exp(G))      V~ = U - W S
    P_ij = <q_i exp(G_i - G_j), k_j>  (i >= j)
    O = (Q exp(G)) S + P V~         S <- diag(exp(G_C)) S + (K exp(G_C - G))^T V~

``exp(-G)`` is never formed over a whole range that could overflow. With a gate bound the pair
differences are factored around the chunk's middle row, which keeps both factors below e^80; without
one (softplus gate) the differences are formed pair by pair. X is applied by forward substitution.

Letters: T rows, S sequences, N chunks, H heads, C rows of a chunk, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moonlet.kernels.kda.reference import KDAResult, kda_gate, l2_norm
from moonlet.kernels.ragged import Ragged

__all__ = ["chunk_size_for", "kda_chunk"]

UNBOUNDED_CHUNK = 16
MAX_CHUNK = 64
# both factors of exp(G_i - G_r) exp(G_r - G_j) must stay inside float32
MAX_LOG_SPAN = 160.0


class _Layout(NamedTuple):
    """Chunks in scan order: step j holds chunk j of every sequence that has one."""

    rows_NC: Tensor
    order_S: Tensor
    active: tuple[int, ...]


def chunk_size_for(lower_bound: float | None) -> int:
    """Largest power of two whose decay span keeps the factored form finite."""
    if lower_bound is None:
        return UNBOUNDED_CHUNK
    size = MAX_CHUNK
    while size > 1 and size * -lower_bound > MAX_LOG_SPAN:
        size //= 2
    return size


def _layout(ragged: Ragged, size: int) -> _Layout:
    """Arrange rows into chunks; absent rows point at T, one past the last row."""
    lens = torch.tensor(ragged.seq_lens)
    order = torch.argsort(lens, descending=True, stable=True)
    starts = torch.cumsum(lens, 0) - lens
    sorted_lens, sorted_starts = lens[order], starts[order]
    num_chunks = (sorted_lens + size - 1) // size
    within = torch.arange(size)
    rows: list[Tensor] = []
    active: list[int] = []
    for j in range(int(num_chunks[0])):
        count = int((num_chunks > j).sum())
        offset = j * size + within
        row = sorted_starts[:count, None] + offset
        rows.append(torch.where(offset < sorted_lens[:count, None], row, ragged.num_rows))
        active.append(count)
    return _Layout(torch.cat(rows).to(ragged.device), order.to(ragged.device), tuple(active))


def _gather(x_T: Tensor, rows_NC: Tensor) -> Tensor:
    """``[T, H, ...] -> [N, H, C, ...]`` with zeros at absent rows."""
    padded = torch.cat([x_T, x_T.new_zeros((1, *x_T.shape[1:]))])
    return padded[rows_NC].transpose(1, 2)


def _pair_products(left: Tensor, right: Tensor, G: Tensor, is_bounded: bool) -> Tensor:
    """``sum_d left_id right_jd exp(G_id - G_jd)``; only entries with i >= j are meaningful."""
    if is_bounded:
        middle = G[..., G.shape[-2] // 2, None, :]
        return (left * (G - middle).exp()) @ (right * (middle - G).exp()).transpose(-1, -2)
    span = G[..., :, None, :] - G[..., None, :, :]
    size = G.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=G.device).tril()
    # entries above the diagonal would overflow; they are removed before the exponential
    decay = span.masked_fill(~lower[..., None], float("-inf")).exp()
    return torch.einsum("nhid,nhijd,nhjd->nhij", left, decay, right)


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
    """Run every sequence chunk by chunk; arguments and result as in `reference.kda_chunk`."""
    size = chunk_size_for(lower_bound)
    layout = _layout(ragged, size)
    gathered = [
        _gather(x, layout.rows_NC)
        for x in (
            l2_norm(q_THK) * q_THK.shape[-1] ** -0.5,
            l2_norm(k_THK),
            v_THV.float(),
            kda_gate(z_THK, A_log_H, dt_bias_HK, lower_bound),
            torch.sigmoid(beta_logits_TH.float()),
        )
    ]
    factors = _factors(*gathered, is_bounded=lower_bound is not None)
    keeps = emit_at_E is not None
    scan = _scan(factors, state_SHKV[layout.order_S], layout.active, keeps_states=keeps)

    slot_T = torch.empty(ragged.num_rows + 1, dtype=torch.int64, device=v_THV.device)
    slot_T[layout.rows_NC.flatten()] = torch.arange(layout.rows_NC.numel(), device=v_THV.device)
    slot_T = slot_T[:-1]
    final = torch.empty_like(layout.order_S)
    final[layout.order_S] = torch.arange(ragged.num_seqs, device=v_THV.device)
    emitted = None
    if emit_at_E is not None:
        where = slot_T[emit_at_E]
        entering, written = torch.cat(scan.entering), torch.cat(scan.written)
        emitted = _states_after(
            where // size, where % size, factors.k, factors.G, entering, written
        )
    o = torch.cat(scan.outputs).transpose(1, 2).flatten(0, 1)
    states = torch.cat(scan.finished[::-1])[final]
    return KDAResult(o[slot_T].to(v_THV.dtype), states, emitted)


class _Factors(NamedTuple):
    """What every chunk needs before its entering state is known; names as in the equations."""

    k: Tensor
    G: Tensor
    U: Tensor
    W: Tensor
    P: Tensor
    read: Tensor
    write: Tensor
    keep: Tensor


def _factors(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, is_bounded: bool
) -> _Factors:
    """All chunks at once; inputs ``[N, H, C, ...]``, float32."""
    G = g.cumsum(-2)
    size = G.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=G.device).tril()
    A = _pair_products(k * beta[..., None], k, G, is_bounded).masked_fill(~lower.tril(-1), 0.0)
    P = _pair_products(q, k, G, is_bounded).masked_fill(~lower, 0.0)
    decay = G.exp()
    rhs = torch.cat([v, k * decay], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
    U, W = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = G[..., -1:, :]
    write = (k * (last - G).exp()).transpose(-1, -2)
    return _Factors(k, G, U, W, P, q * decay, write, last.exp().transpose(-1, -2))


class _Scan(NamedTuple):
    """What the steps left behind; entering states and written values only where asked for."""

    outputs: list[Tensor]
    entering: list[Tensor]
    written: list[Tensor]
    finished: list[Tensor]


def _scan(factors: _Factors, state: Tensor, active: Sequence[int], *, keeps_states: bool) -> _Scan:
    """Carry the states through the chunks; step j runs chunk j of the sequences that have one."""
    scan = _Scan([], [], [], [])
    first = 0
    for count in active:
        if count < state.shape[0]:
            scan.finished.append(state[count:])
            state = state[:count]
        chunk = slice(first, first + count)
        fresh = factors.U[chunk] - factors.W[chunk] @ state
        scan.outputs.append(factors.read[chunk] @ state + factors.P[chunk] @ fresh)
        if keeps_states:
            scan.entering.append(state)
            scan.written.append(fresh)
        state = factors.keep[chunk] * state + factors.write[chunk] @ fresh
        first += count
    scan.finished.append(state)
    return scan


def _states_after(
    chunk_E: Tensor, row_E: Tensor, k: Tensor, G: Tensor, entering: Tensor, written: Tensor
) -> Tensor:
    """States after single rows inside chunks, float32 ``[E, H, K, V]``."""
    G_E = G[chunk_E]
    at = G_E.gather(-2, row_E[:, None, None, None].expand(-1, *G_E.shape[1:2], 1, G_E.shape[3]))
    past = torch.arange(G.shape[-2], device=G.device) <= row_E[:, None]
    span = (at - G_E).masked_fill(~past[:, None, :, None], float("-inf"))
    write = (k[chunk_E] * span.exp()).transpose(-1, -2)
    return at.exp().transpose(-1, -2) * entering[chunk_E] + write @ written[chunk_E]
