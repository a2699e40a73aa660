"""Cases of the norms: rows of the hidden size, heads of KDA's output."""

from __future__ import annotations

from collections.abc import Iterator

from moonlet.bench import costs
from moonlet.bench.cases.case import Case, Shape

__all__ = ["gated_rms_norm", "rms_norm"]


def rms_norm(shape: Shape) -> Iterator[Case]:
    """Rows of the hidden size."""
    rows, size, eps = shape.rows, shape.config.hidden_size, shape.config.rms_norm_eps
    yield Case(
        cost=costs.rms_norm(rows, size),
        make=lambda: (shape.normal(rows, size), 1 + shape.normal(size, scale=0.1), eps),
    )


def gated_rms_norm(shape: Shape) -> Iterator[Case]:
    """All heads of every row."""
    kda, eps = shape.config.kda, shape.config.rms_norm_eps
    size = (shape.rows, kda.num_heads, kda.head_dim)
    yield Case(
        cost=costs.gated_rms_norm(shape.rows * kda.num_heads, kda.head_dim),
        make=lambda: (
            shape.normal(*size),
            1 + shape.normal(kda.head_dim, scale=0.1),
            shape.normal(*size),
            eps,
        ),
    )
