"""Cases of latent attention: a decode batch over its context, rows of one sequence after theirs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moonlet.bench import costs
from moonlet.bench.cases.case import MAX_SEQS, Case, Shape
from moonlet.kernels.ragged import Ragged

__all__ = ["mla_decode", "mla_prefill"]


def _widths(shape: Shape) -> tuple[int, int, int, int, int]:
    """Heads, nope, shared, latent and value width."""
    mla = shape.config.mla
    return (
        mla.num_attention_heads,
        mla.qk_nope_head_dim,
        mla.qk_rope_head_dim,
        mla.kv_lora_rank,
        mla.v_head_dim,
    )


def _inputs(shape: Shape, num_seqs: int, context: int) -> tuple[Tensor, ...]:
    """Queries, latents, shared keys and the expansion."""
    heads, nope, shared, latent, value = _widths(shape)
    return (
        shape.normal(shape.rows, heads, nope + shared),
        shape.normal(num_seqs, context, latent),
        shape.normal(num_seqs, context, shared),
        shape.weight(heads, nope + value, latent),
    )


def mla_decode(shape: Shape) -> Iterator[Case]:
    """One row of every sequence over the context before it and itself."""
    rows, context = shape.rows, shape.context + 1
    if rows > MAX_SEQS:
        return
    lengths = torch.full((rows,), context)
    yield Case(
        cost=costs.mla_decode(rows, context, *_widths(shape)),
        make=lambda: (*_inputs(shape, rows, context), lengths),
    )


def mla_prefill(shape: Shape) -> Iterator[Case]:
    """Rows of one sequence over the context before them and themselves."""
    rows, start = shape.rows, shape.context
    ragged, starts = Ragged.build([rows]), torch.tensor([start])
    yield Case(
        cost=costs.mla_prefill(rows, start, *_widths(shape)),
        make=lambda: (*_inputs(shape, 1, start + rows), starts, ragged),
    )
