"""Cases of the router and the routed experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from moonlet.bench import costs
from moonlet.bench.cases.case import Arguments, Case, Shape
from moonlet.kernels.registry import resolve
from moonlet.model.layers import gated_activation

__all__ = ["moe_experts", "route_topk"]


def route_topk(shape: Shape) -> Iterator[Case]:
    """Rows of the hidden size against every expert."""
    moe, rows, size = shape.config.moe, shape.rows, shape.config.hidden_size
    if moe is None:
        return
    yield Case(
        cost=costs.route_topk(rows, size, moe.num_experts, moe.num_experts_per_token),
        make=lambda: (
            shape.normal(rows, size),
            shape.weight(moe.num_experts, size),
            shape.normal(moe.num_experts, scale=0.1),
            moe,
        ),
    )


def moe_experts(shape: Shape) -> Iterator[Case]:
    """Rows that choose experts uniformly; copies share the weights and choose anew."""
    moe, rows, size = shape.config.moe, shape.rows, shape.config.expert_input_size
    if moe is None:
        return
    experts, active, width = moe.num_experts, moe.num_experts_per_token, moe.moe_intermediate_size
    activation = gated_activation(shape.config, resolve("cpu", shape.config, is_inference=True))
    # what a uniform choice touches on average
    distinct = round(experts * (1 - (1 - active / experts) ** rows))

    def chosen() -> Arguments:
        ids = shape.normal(rows, experts).topk(active).indices
        return shape.normal(rows, size), ids, shape.normal(rows, active).softmax(-1)

    def stacked(size_out: int, size_in: int) -> Tensor:
        # one matrix scaled differently for every expert: drawing a gigabyte takes long
        scale_E = 0.5 + shape.normal(experts).abs()
        return scale_E[:, None, None] * shape.weight(size_out, size_in)

    def make() -> Arguments:
        w1, w3, w2 = stacked(width, size), stacked(width, size), stacked(size, width)
        return (*chosen(), w1, w3, w2, activation)

    yield Case(
        cost=costs.moe_experts(rows, active, distinct, size, width, 12 * size * width),
        make=make,
        another=lambda arguments: (*chosen(), *arguments[3:]),
    )
