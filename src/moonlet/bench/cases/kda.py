"""Cases of Kimi Delta Attention: the convolution, a decode step, rows of one sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moonlet.bench import costs
from moonlet.bench.cases.case import MAX_SEQS, Arguments, Case, Shape
from moonlet.kernels.ragged import Ragged

__all__ = ["kda_chunk", "kda_step", "short_conv", "short_conv_step"]

# the recurrence adds the rounding of every row before; chunk forms order the sums otherwise
TOLERANCE = 2e-5
# slots of the arena that belong to sequences outside the batch
OTHER_SLOTS = 2


def short_conv(shape: Shape) -> Iterator[Case]:
    """q, k and v of a decode batch, and of one sequence."""
    kda, rows = shape.config.kda, shape.rows
    channels, taps = 3 * kda.projection_size, kda.short_conv_kernel_size
    batches = {"prefill": [rows]}
    if rows <= MAX_SEQS:
        batches["decode"] = [1] * rows
    for label, lens in batches.items():
        ragged, num_seqs = Ragged.build(lens), len(lens)
        yield Case(
            label=label,
            cost=costs.short_conv(rows, num_seqs, channels, taps),
            make=lambda ragged=ragged, num_seqs=num_seqs: (
                shape.normal(rows, channels),
                shape.weight(channels, taps),
                shape.normal(num_seqs, channels, taps - 1),
                ragged,
            ),
        )


def short_conv_step(shape: Shape) -> Iterator[Case]:
    """One row of every sequence, whose carries lie anywhere in an arena."""
    kda, rows = shape.config.kda, shape.rows
    if rows > MAX_SEQS:
        return
    width, taps = kda.projection_size, kda.short_conv_kernel_size
    num_slots = rows + OTHER_SLOTS

    def make() -> Arguments:
        slots = torch.randperm(num_slots, generator=shape.generator)[:rows]
        weights = tuple(shape.weight(width, taps) for _ in range(3))
        state = shape.normal(num_slots, 3 * width, taps - 1)
        return shape.normal(rows, 3 * width), weights, state, slots

    yield Case(cost=costs.short_conv(rows, rows, 3 * width, taps), make=make)


def _inputs(shape: Shape) -> list[Tensor | float | None]:
    """q, k, v, z, beta, ``A_log``, ``dt_bias`` and the bound."""
    kda = shape.config.kda
    heads = (shape.rows, kda.num_heads, kda.head_dim)
    return [
        *(shape.normal(*heads) for _ in range(4)),
        shape.normal(*heads[:2]),
        shape.normal(kda.num_heads, scale=0.5),
        shape.normal(*heads[1:]),
        kda.gate_lower_bound,
    ]


def _state(shape: Shape, num_seqs: int) -> Tensor:
    kda = shape.config.kda
    return shape.normal(num_seqs, kda.num_heads, kda.head_dim, kda.head_dim, scale=0.3)


def kda_step(shape: Shape) -> Iterator[Case]:
    """One row of every sequence, whose states lie anywhere in an arena."""
    kda, rows = shape.config.kda, shape.rows
    if rows > MAX_SEQS:
        return
    num_slots = rows + OTHER_SLOTS

    def make() -> Arguments:
        slots = torch.randperm(num_slots, generator=shape.generator)[:rows]
        return (*_inputs(shape), _state(shape, num_slots), slots)

    yield Case(
        cost=costs.kda(rows, rows, kda.num_heads, kda.head_dim, kda.head_dim),
        make=make,
        tolerance=TOLERANCE,
    )


def kda_chunk(shape: Shape) -> Iterator[Case]:
    """Rows of one sequence that continues."""
    kda, rows = shape.config.kda, shape.rows
    ragged = Ragged.build([rows])
    yield Case(
        cost=costs.kda(rows, 1, kda.num_heads, kda.head_dim, kda.head_dim),
        make=lambda: (*_inputs(shape), _state(shape, 1), ragged),
        tolerance=TOLERANCE,
    )
