"""Cases of the gated activations: rows of the shared experts' width."""

from __future__ import annotations

from collections.abc import Iterator

from moonlet.bench import costs
from moonlet.bench.cases.case import Case, Shape

__all__ = ["situ_glu", "swiglu"]


def _size(shape: Shape) -> tuple[int, int]:
    moe = shape.config.moe
    width = 0 if moe is None else moe.shared_intermediate_size
    return shape.rows, width or shape.config.intermediate_size


def situ_glu(shape: Shape) -> Iterator[Case]:
    """Gate and up projections around the caps."""
    rows, width = _size(shape)
    caps = (shape.config.activation_situ_beta, shape.config.activation_situ_linear_beta)
    yield Case(
        cost=costs.situ_glu(rows * width),
        make=lambda: (shape.normal(rows, width, scale=4), shape.normal(rows, width), *caps),
    )


def swiglu(shape: Shape) -> Iterator[Case]:
    """Gate and up projections."""
    rows, width = _size(shape)
    yield Case(
        cost=costs.swiglu(rows * width),
        make=lambda: (shape.normal(rows, width), shape.normal(rows, width)),
    )
