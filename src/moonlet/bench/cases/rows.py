"""Cases of operators on whole rows: the token table, the residual sum, the gate of Gated MLA."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moonlet.bench import costs
from moonlet.bench.cases.case import Case, Shape

__all__ = ["add", "embed", "sigmoid_gate"]

STORED = (torch.float32, torch.bfloat16)
# entries of the table; more would only take memory
ENTRIES = 4096


def embed(shape: Shape) -> Iterator[Case]:
    """Rows of a table as it may be stored."""
    rows, size = shape.rows, shape.config.hidden_size
    entries = min(ENTRIES, shape.config.vocab_size)
    for stored in STORED:
        yield Case(
            label=str(stored).removeprefix("torch."),
            cost=costs.embed(rows, size, stored.itemsize),
            make=lambda stored=stored: (
                shape.integers(entries, rows),
                shape.normal(entries, size).to(stored),
                torch.float32,
            ),
        )


def add(shape: Shape) -> Iterator[Case]:
    """The prefix sum and a sublayer's output."""
    size = (shape.rows, shape.config.hidden_size)
    yield Case(
        cost=costs.add(size[0] * size[1]),
        make=lambda: (shape.normal(*size), shape.normal(*size)),
    )


def sigmoid_gate(shape: Shape) -> Iterator[Case]:
    """What attention read and the gate logits."""
    mla = shape.config.mla
    size = (shape.rows, mla.num_attention_heads * mla.v_head_dim)
    yield Case(
        cost=costs.sigmoid_gate(size[0] * size[1]),
        make=lambda: (shape.normal(*size), shape.normal(*size, scale=4)),
    )
