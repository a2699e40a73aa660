"""Cases of Kimi Delta Attention: the convolution, a decode step, windows, rows of one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moonlet.bench import costs
from moonlet.bench.cases.case import MAX_SEQS, Arguments, Case, Shape
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.registry import resolve

__all__ = [
    "kda_chunk",
    "kda_replay",
    "kda_step",
    "kda_window",
    "short_conv",
    "short_conv_step",
]

# the recurrence adds the rounding of every row before; chunk forms order the sums otherwise
TOLERANCE = 2e-5
# slots of the arena that belong to sequences outside the batch
OTHER_SLOTS = 2
# rows of the context that are drawn; a longer one repeats them
CONTEXT_ROWS = 2048
# rows of a verification window
WINDOW_ROWS = 8


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


def _state_after(shape: Shape) -> Tensor:
    """The state ``[1, H, K, V]`` that the context leaves."""
    kernels = resolve("cpu", shape.config, is_inference=True)
    kda, left = shape.config.kda, shape.context
    state = torch.zeros(1, kda.num_heads, kda.head_dim, kda.head_dim)
    drawn = _inputs(replace(shape, rows=min(CONTEXT_ROWS, left)))
    for rows in [CONTEXT_ROWS] * (left // CONTEXT_ROWS) + [left % CONTEXT_ROWS]:
        if rows:
            piece = [x[:rows] for x in drawn[:5] if isinstance(x, Tensor)]
            state = kernels.kda_chunk(*piece, *drawn[5:], state, Ragged.build([rows])).state_SHKV
    return state


def kda_step(shape: Shape) -> Iterator[Case]:
    """One row of every sequence after its context, whose states lie anywhere in an arena."""
    kda, rows = shape.config.kda, shape.rows
    if rows > MAX_SEQS:
        return
    num_slots = rows + OTHER_SLOTS

    def make() -> Arguments:
        slots = torch.randperm(num_slots, generator=shape.generator)[:rows]
        # what is drawn beside it tells the slots apart
        state = _state_after(shape) + _state(shape, num_slots)
        return (*_inputs(shape), state, slots)

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


def _windows(shape: Shape, *, moves: bool) -> Iterator[Case]:
    """Windows of 8 rows and one of what is left, all of whose rows stay where memory moves."""
    kda, rows = shape.config.kda, shape.rows
    whole, rest = divmod(rows, WINDOW_ROWS)
    ragged = Ragged.build([WINDOW_ROWS] * whole + ([rest] if rest else []))
    num_seqs = ragged.num_seqs
    if num_seqs > MAX_SEQS:
        return
    width, taps = kda.projection_size, kda.short_conv_kernel_size
    num_slots = num_seqs + OTHER_SLOTS

    def make() -> Arguments:
        slots = torch.randperm(num_slots, generator=shape.generator)[:num_seqs]
        _, _, _, *gates = _inputs(shape)
        weights = tuple(shape.weight(width, taps) for _ in range(3))
        memory = _state(shape, num_slots), shape.normal(num_slots, 3 * width, taps - 1)
        arguments = (shape.normal(rows, 3 * width), weights, *gates, *memory, slots, ragged)
        return (*arguments, ragged.lens_S) if moves else arguments

    sizes = (kda.num_heads, kda.head_dim, kda.head_dim, taps)
    yield Case(
        cost=costs.kda_window(rows, num_seqs, *sizes, moves=moves),
        make=make,
        tolerance=TOLERANCE,
    )


def kda_window(shape: Shape) -> Iterator[Case]:
    """Outputs of verification windows, whose memory stays as it is."""
    yield from _windows(shape, moves=False)


def kda_replay(shape: Shape) -> Iterator[Case]:
    """The same windows when it is known that their rows stay."""
    yield from _windows(shape, moves=True)
