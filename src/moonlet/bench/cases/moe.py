"""Cases of the router and the routed experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from moonlet.bench import costs
from moonlet.bench.cases.case import Arguments, Case, Shape, whole_groups
from moonlet.core.config import MoEConfig
from moonlet.kernels.microscaling import GROUP_SIZE
from moonlet.kernels.registry import resolve
from moonlet.kernels.situ.gated import GatedActivation
from moonlet.model.layers import gated_activation

__all__ = ["moe_experts", "moe_mxfp4", "route_topk"]

# Error ratio per rounding of the products' inputs. Where they are rounded, a hidden value near the
# border of two codes falls to the other side when its sum runs in another order; one mode taken for
# another differs by more.
MODES = {"bf16": 1e-5, "mxfp8": 1e-3, "mxfp8-floor": 1e-3, "int8": 1e-3}


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

    def stacked(size_out: int, size_in: int) -> Tensor:
        # one matrix scaled differently for every expert: drawing a gigabyte takes long
        scale_E = 0.5 + shape.normal(experts).abs()
        return scale_E[:, None, None] * shape.weight(size_out, size_in)

    def make() -> Arguments:
        w1, w3, w2 = stacked(width, size), stacked(width, size), stacked(size, width)
        return (*_chosen(shape, moe, size), w1, w3, w2, _activation(shape))

    distinct = _distinct(moe, rows)
    yield Case(
        cost=costs.moe_experts(rows, active, distinct, size, width, 12 * size * width),
        make=make,
        another=lambda arguments: (*_chosen(shape, moe, size), *arguments[3:]),
    )


def moe_mxfp4(shape: Shape) -> Iterator[Case]:
    """As `moe_experts` with packed weights, per rounding; widths become whole groups."""
    moe, rows = shape.config.moe, shape.rows
    if moe is None:
        return
    experts, active = moe.num_experts, moe.num_experts_per_token
    size = whole_groups(shape.config.expert_input_size)
    width = whole_groups(moe.moe_intermediate_size)
    sizes = ((width, size), (width, size), (size, width))

    def make(mode: str) -> Arguments:
        matrices = (shape.packed(experts, *each) for each in sizes)
        return (*_chosen(shape, moe, size), *matrices, _activation(shape), mode)

    distinct = _distinct(moe, rows)
    expert_bytes = 3 * size * width * (1 / 2 + 1 / GROUP_SIZE)
    for mode, tolerance in MODES.items():
        yield Case(
            label=mode,
            cost=costs.moe_experts(rows, active, distinct, size, width, expert_bytes),
            make=lambda mode=mode: make(mode),
            another=lambda arguments: (*_chosen(shape, moe, size), *arguments[3:]),
            tolerance=tolerance,
        )


def _chosen(shape: Shape, moe: MoEConfig, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts of each and their weights."""
    rows, active = shape.rows, moe.num_experts_per_token
    ids = shape.normal(rows, moe.num_experts).topk(active).indices
    return shape.normal(rows, size), ids, shape.normal(rows, active).softmax(-1)


def _distinct(moe: MoEConfig, rows: int) -> int:
    """What a uniform choice touches on average."""
    idle = (1 - moe.num_experts_per_token / moe.num_experts) ** rows
    return round(moe.num_experts * (1 - idle))


def _activation(shape: Shape) -> GatedActivation:
    return gated_activation(shape.config, resolve("cpu", shape.config, is_inference=True))
