"""Native inference of Gated MLA: `csrc/mla_absorbed.cpp` and `csrc/mla_expanded.cpp`.

Both read the pages where they lie and keep a running softmax, so nothing of the size of queries
times context exists. Two forms give the same result up to rounding, and a sequence takes the
cheaper one. Per head, with T new rows over a context of N and A = T (N - T) + T (T + 1) / 2 visible
pairs, in multiply-adds:

    expanded   ceil(T / 2048) N R (nope + V) + A (nope + P + V)     blocks become keys and values
    absorbed   T R (nope + V) + A (2 R + P)                         queries meet the latents

Decode is always absorbed. A row's result depends neither on the threads nor on its neighbours.

Letters as in `reference`; T packed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.mla.reference import MLAPrefillResult
from moonlet.kernels.ragged import Ragged

__all__ = ["mla_append", "mla_decode", "mla_prefill"]

# as in csrc: queries that share an expansion, and heads that fill the lanes of a vector
TASK_ROWS = 2048
LANES = 16


def mla_append(pages_GLC: Tensor, rows_T: Tensor, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
    """Arguments and effect as in `reference.mla_append`; all float32.

    Raises:
        ShapeError: A tensor has another dtype, or the shapes do not fit.
        BackendError: A row lies outside the pages; nothing was changed.
    """
    num_rows, (pages, page_size, width) = rows_T.shape[0], pages_GLC.shape
    latent, shared = latent_TR.shape[1], k_shared_TP.shape[1]
    _native_ops.require("rows", rows_T, torch.int64, num_rows)
    _native_ops.require("latent", latent_TR, torch.float32, num_rows, latent)
    _native_ops.require("k_shared", k_shared_TP, torch.float32, num_rows, width - latent)
    _native_ops.require("pages", pages_GLC, torch.float32, pages, page_size, width)
    parts = [x if x.stride(1) == 1 else x.contiguous() for x in (latent_TR, k_shared_TP)]
    _native_ops.call(
        "mla_append",
        *(*map(_native_ops.Rows, parts), rows_T, pages_GLC, num_rows, pages * page_size),
        *(latent, shared, *(max(part.stride(0), part.shape[1]) for part in parts)),
    )


def mla_decode(q_SHQ: Tensor, pages: LatentPages, kv_b_HOR: Tensor) -> Tensor:
    """Arguments and result as in `reference.mla_decode`; rows and queries float32.

    Raises:
        ShapeError: A tensor has another dtype, or the shapes do not fit.
    """
    seqs = torch.arange(len(pages.lengths_S))
    return _absorbed(q_SHQ, pages, kv_b_HOR, seqs, pages.lengths_S, None)


def mla_prefill(
    q_THQ: Tensor,
    pages: LatentPages,
    kv_b_HOR: Tensor,
    ragged: Ragged,
    with_max_score: bool = False,
) -> MLAPrefillResult:
    """Arguments and result as in `reference.mla_prefill`; rows and queries float32.

    Raises:
        ShapeError: A tensor has another dtype, or the shapes do not fit.
    """
    heads, _, _, value_size, _ = _sizes(q_THQ, pages, kv_b_HOR, ragged.num_rows)
    lengths = pages.lengths_S.tolist()
    if len(lengths) != ragged.num_seqs:
        raise ShapeError(f"pages of {len(lengths)} sequences for {ragged.num_seqs} in the batch")
    is_absorbed = [
        _prefers_absorbed(n, length, heads, value_size, q_THQ.shape[-1], pages)
        for n, length in zip(ragged.seq_lens, lengths, strict=True)
    ]
    if all(is_absorbed) or not any(is_absorbed):
        return _one_form(is_absorbed[0], q_THQ, pages, kv_b_HOR, ragged, with_max_score)
    o_THV = q_THQ.new_empty(q_THQ.shape[0], heads, value_size)
    maxima = []
    for form in (True, False):
        seqs = torch.tensor([s for s, flag in enumerate(is_absorbed) if flag is form])
        rows = torch.isin(ragged.seq_of_T, seqs).nonzero()[:, 0]
        part = Ragged.build([ragged.seq_lens[s] for s in seqs.tolist()])
        result = _one_form(form, q_THQ[rows], pages.select(seqs), kv_b_HOR, part, with_max_score)
        o_THV[rows] = result.o_THV
        maxima.append(result.max_score_H)
    first, second = maxima
    if first is None or second is None:
        return MLAPrefillResult(o_THV, None)
    return MLAPrefillResult(o_THV, torch.maximum(first, second))


def _prefers_absorbed(
    new: int, length: int, heads: int, value_size: int, query_size: int, pages: LatentPages
) -> bool:
    latent, shared = pages.latent_size, pages.shared_size
    pairs = new * (length - new) + new * (new + 1) // 2
    weights = latent * (query_size - shared + value_size)
    expanded = -(-new // TASK_ROWS) * length * weights + pairs * (query_size + value_size)
    idle_lanes = -(-heads // LANES) * LANES / heads
    return new * weights + pairs * (2 * latent + shared) * idle_lanes < expanded


def _one_form(
    is_absorbed: bool,
    q_THQ: Tensor,
    pages: LatentPages,
    kv_b_HOR: Tensor,
    ragged: Ragged,
    with_max_score: bool,
) -> MLAPrefillResult:
    max_TH = q_THQ.new_empty(q_THQ.shape[:2]) if with_max_score else None
    if is_absorbed:
        start_S = pages.lengths_S - ragged.lens_S
        seen_T = start_S[ragged.seq_of_T] + ragged.offset_T + 1
        o_THV = _absorbed(q_THQ, pages, kv_b_HOR, ragged.seq_of_T, seen_T, max_TH)
    else:
        o_THV = _expanded(q_THQ, pages, kv_b_HOR, ragged, max_TH)
    return MLAPrefillResult(o_THV, None if max_TH is None else max_TH.amax(0))


def _absorbed(
    q_THQ: Tensor,
    pages: LatentPages,
    kv_b_HOR: Tensor,
    seqs_T: Tensor,
    seen_T: Tensor,
    max_TH: Tensor | None,
) -> Tensor:
    """Row t sees the first ``seen_T[t]`` rows of sequence ``seqs_T[t]``."""
    num_rows, sizes = seqs_T.shape[0], _sizes(q_THQ, pages, kv_b_HOR, seqs_T.shape[0])
    seen_T = seen_T.contiguous()
    # room for the longest context that the table can name: the same in every step of a sequence
    longest = pages.table_SB.shape[1] * pages.rows_GLC.shape[1]
    count = _native_ops.query("mla_absorbed_scratch", (longest,), (num_rows, *sizes))
    tables = (pages.rows_GLC, pages.table_SB.contiguous(), seqs_T, seen_T)
    return _run("mla_absorbed", q_THQ, tables, kv_b_HOR, max_TH, count, (num_rows,), sizes)


def _expanded(
    q_THQ: Tensor, pages: LatentPages, kv_b_HOR: Tensor, ragged: Ragged, max_TH: Tensor | None
) -> Tensor:
    """The new rows are the last ones of each sequence, causal among themselves."""
    sizes = _sizes(q_THQ, pages, kv_b_HOR, ragged.num_rows)
    starts, lengths_S = ragged.cu_seqlens_S1.long(), pages.lengths_S.contiguous()
    count = _native_ops.query(
        "mla_expanded_scratch", (starts, lengths_S), (ragged.num_seqs, *sizes)
    )
    tables = (pages.rows_GLC, pages.table_SB.contiguous(), starts, lengths_S)
    return _run("mla_expanded", q_THQ, tables, kv_b_HOR, max_TH, count, (), sizes)


def _run(
    name: str,
    q_THQ: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    kv_b_HOR: Tensor,
    max_TH: Tensor | None,
    scratch_size: int,
    counts: tuple[int, ...],
    sizes: tuple[int, int, int, int, int],
) -> Tensor:
    heads, _, _, value_size, _ = sizes
    rows_GLC, table_SB, _, _ = tables
    o_THV = q_THQ.new_empty(q_THQ.shape[0], heads, value_size)
    scratch = torch.empty(scratch_size)
    _native_ops.call(
        name,
        q_THQ.contiguous(),
        *tables,
        kv_b_HOR.contiguous(),
        int(kv_b_HOR.dtype == torch.bfloat16),
        o_THV,
        max_TH,
        scratch,
        scratch_size,
        *counts,
        table_SB.shape[0],
        *rows_GLC.shape[:2],
        table_SB.shape[1],
        *sizes,
    )
    return o_THV


def _sizes(
    q_THQ: Tensor, pages: LatentPages, kv_b_HOR: Tensor, num_rows: int
) -> tuple[int, int, int, int, int]:
    """Check what the library would trust; heads, nope, shared, value and latent size."""
    heads, width, latent = kv_b_HOR.shape
    shared, query = pages.shared_size, q_THQ.shape[-1]
    weights = kv_b_HOR.dtype if kv_b_HOR.dtype == torch.bfloat16 else torch.float32
    num_pages, page_size, row_size = pages.rows_GLC.shape
    num_seqs, pages_per_seq = pages.table_SB.shape
    _native_ops.require("kv_b", kv_b_HOR, weights, heads, width, pages.latent_size)
    _native_ops.require("q", q_THQ, torch.float32, num_rows, heads, query)
    _native_ops.require("rows", pages.rows_GLC, torch.float32, num_pages, page_size, row_size)
    _native_ops.require("table", pages.table_SB, torch.int64, num_seqs, pages_per_seq)
    _native_ops.require("lengths", pages.lengths_S, torch.int64, num_seqs)
    nope = query - shared
    if nope < 1 or width <= nope:
        raise ShapeError(
            f"queries of {query} with a shared part of {shared} do not fit kv_b of "
            f"{list(kv_b_HOR.shape)}; key and value of a head must both have a width"
        )
    return heads, nope, shared, width - nope, latent
