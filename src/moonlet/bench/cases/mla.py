"""Cases of latent attention: a decode batch over its context, rows of one sequence after theirs.

The context lies in pages in any order, as in the engine. The expansion is float32, or bfloat16 as
it is published.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moonlet.bench import costs
from moonlet.bench.cases.case import MAX_SEQS, Arguments, Case, Shape
from moonlet.engine.memory import DEFAULT_MEMORY
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.ragged import Ragged

__all__ = ["mla_append", "mla_decode", "mla_prefill"]

STORED = (torch.float32, torch.bfloat16)


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


def _inputs(
    shape: Shape, num_seqs: int, context: int, stored: torch.dtype
) -> tuple[Tensor, LatentPages, Tensor]:
    """Queries, pages and the expansion."""
    heads, nope, shared, latent, value = _widths(shape)
    per_seq = -(-context // DEFAULT_MEMORY.page_size)
    order = torch.randperm(num_seqs * per_seq, generator=shape.generator)
    pages = LatentPages(
        rows_GLC=shape.normal(num_seqs * per_seq, DEFAULT_MEMORY.page_size, latent + shared),
        table_SB=order.view(num_seqs, per_seq),
        lengths_S=torch.full((num_seqs,), context),
        latent_size=latent,
    )
    expansion = shape.weight(heads, nope + value, latent).to(stored)
    return shape.normal(shape.rows, heads, nope + shared), pages, expansion


def _label(stored: torch.dtype) -> str:
    return str(stored).removeprefix("torch.")


def mla_append(shape: Shape) -> Iterator[Case]:
    """New rows of a batch, each to a page of its own choice."""
    _, _, shared, latent, _ = _widths(shape)
    rows = shape.rows
    num_pages = -(-2 * rows // DEFAULT_MEMORY.page_size)

    def make() -> Arguments:
        places = torch.randperm(num_pages * DEFAULT_MEMORY.page_size, generator=shape.generator)[
            :rows
        ]
        pages = shape.normal(num_pages, DEFAULT_MEMORY.page_size, latent + shared)
        return pages, places, shape.normal(rows, latent), shape.normal(rows, shared)

    yield Case(cost=costs.mla_append(rows, latent + shared), make=make)


def mla_decode(shape: Shape) -> Iterator[Case]:
    """One row of every sequence over the context before it and itself."""
    rows, context = shape.rows, shape.context + 1
    if rows > MAX_SEQS:
        return
    for stored in STORED:
        yield Case(
            label=_label(stored),
            cost=costs.mla_decode(rows, context, *_widths(shape), stored.itemsize),
            make=lambda stored=stored: _inputs(shape, rows, context, stored),
        )


def mla_prefill(shape: Shape) -> Iterator[Case]:
    """Rows of one sequence over the context before them and themselves."""
    rows, start = shape.rows, shape.context
    ragged = Ragged.build([rows])

    def make(stored: torch.dtype) -> Arguments:
        return (*_inputs(shape, 1, start + rows, stored), ragged)

    for stored in STORED:
        yield Case(
            label=_label(stored),
            cost=costs.mla_prefill(rows, start, *_widths(shape), stored.itemsize),
            make=lambda stored=stored: make(stored),
        )
