"""Cases of the linear maps: KDA's query projection as it may be stored, all that read its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moonlet.bench import costs
from moonlet.bench.cases.case import Case, Shape, whole_groups
from moonlet.kernels import int8_panels
from moonlet.kernels.linear.reference import Stored
from moonlet.kernels.microscaling import GROUP_SIZE

__all__ = ["linear", "linear_many"]

# largest int8 weight
STEPS = 127


def _int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    scale_O = weight_OI.abs().amax(1) / STEPS
    return (weight_OI / scale_O[:, None]).round().to(torch.int8), scale_O


def _panels(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    codes_OI, scale_O = _int8(weight_OI)
    return int8_panels.pack(codes_OI), scale_O


STORED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "float32": lambda weight: (weight,),
    "bfloat16": lambda weight: (weight.bfloat16(),),
    "int8": _int8,
    "int8 panels": _panels,
}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int8 panels": 1}


def linear(shape: Shape) -> Iterator[Case]:
    """The same matrix in each stored form; rows of the packed one become whole groups."""
    rows, size_in = shape.rows, shape.config.hidden_size
    size_out = shape.config.kda.projection_size
    for label, store in STORED.items():
        stored_bytes = ELEMENT_BYTES[label] * size_in * size_out
        stored_bytes += 4 * size_out if label.startswith("int8") else 0
        yield Case(
            label=label,
            cost=costs.linear(rows, size_in, size_out, stored_bytes),
            make=lambda store=store: (
                shape.normal(rows, size_in),
                *store(shape.weight(size_out, size_in)),
            ),
        )
    whole = whole_groups(size_in)
    yield Case(
        label="mxfp4",
        cost=costs.linear(rows, whole, size_out, size_out * whole * (1 / 2 + 1 / GROUP_SIZE)),
        make=lambda: (shape.normal(rows, whole), *shape.packed(size_out, whole)),
    )


def linear_many(shape: Shape) -> Iterator[Case]:
    """What KDA computes of its input: q, k, v side by side and three gates, in bfloat16."""
    kda, rows, size_in = shape.config.kda, shape.rows, shape.config.hidden_size
    width = kda.projection_size
    groups = ((width, width, width), (kda.head_dim,), (kda.num_heads,), (width,))
    size_out = sum(sum(group) for group in groups)
    yield Case(
        cost=costs.linear(rows, size_in, size_out, 2 * size_in * size_out),
        make=lambda: (
            shape.normal(rows, size_in),
            tuple(
                tuple(Stored(shape.weight(size, size_in).bfloat16()) for size in group)
                for group in groups
            ),
        ),
    )
