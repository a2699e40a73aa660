"""A case: one call of an operator with its cost, and what builders need to make it.

A builder takes a `Shape` and yields `Case`s; `table.CASES` names it. Everything that a backend
returns or leaves in its arguments is compared, so a builder says nothing about results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moonlet.bench.costs import Cost
from moonlet.core.config import ModelConfig
from moonlet.kernels.microscaling import GROUP_SIZE
from moonlet.kernels.mxfp4 import Packed

__all__ = [
    "MAX_SEQS",
    "Arguments",
    "Builder",
    "Case",
    "Shape",
    "another",
    "map_tensors",
    "tensors_in",
    "whole_groups",
]

Arguments = tuple[Any, ...]

# a decode batch has no more sequences; larger numbers of rows are for operators of prefill
MAX_SEQS = 64
# exponent bytes around 2^-6: random codes then give products of about the size of their inputs
MIN_SCALE, NUM_SCALES = 119, 4


def whole_groups(size: int) -> int:
    """Round up to groups of MXFP4."""
    return -(-size // GROUP_SIZE) * GROUP_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a builder builds for.

    Attributes:
        config: Architecture.
        rows: Rows of the batch: sequences for operators of decoding, rows of one sequence for
            operators of prefill.
        context: Rows that a sequence has before.
        generator: Source of every value.
    """

    config: ModelConfig
    rows: int
    context: int
    generator: torch.Generator

    def normal(self, *size: int, scale: float = 1.0) -> Tensor:
        """Draw float32 values around zero."""
        return torch.randn(size, generator=self.generator) * scale

    def weight(self, *size: int) -> Tensor:
        """Draw a matrix that keeps the variance of what it multiplies."""
        return self.normal(*size, scale=size[-1] ** -0.5)

    def packed(self, *size: int) -> Packed:
        """Draw matrices in MXFP4; the last size is whole groups."""
        *lead, size_in = size
        codes = self._bytes(256, *lead, size_in // 2)
        return Packed(codes, MIN_SCALE + self._bytes(NUM_SCALES, *lead, size_in // GROUP_SIZE))

    def integers(self, high: int, *size: int) -> Tensor:
        """Draw int64 values below ``high``."""
        return torch.randint(high, size, generator=self.generator)

    def _bytes(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, dtype=torch.uint8, generator=self.generator)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested tuples, lists and dataclasses with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        held = {name: change(part) for name, part in parts.items() if isinstance(part, Tensor)}
        # index arithmetic (`Ragged`) keeps what it has derived
        return replace(value, **held) if held else value
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield tensors of nested tuples, lists and dataclasses in order; numbers become tensors."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (bool, int, float)):
        yield torch.tensor(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))


def another(arguments: Arguments) -> Arguments:
    """Return the same values in other memory."""
    return map_tensors(arguments, torch.Tensor.clone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        cost: What it must move and compute.
        make: Draws the arguments.
        label: Tells several cases of one operator apart.
        another: Returns arguments of the same shapes that touch other memory; a copy of
            everything where nothing else is said.
        tolerance: Largest error ratio (root mean square of the difference over that of the
            reference) between two float32 implementations.
    """

    cost: Cost
    make: Callable[[], Arguments]
    label: str = ""
    another: Callable[[Arguments], Arguments] = field(default=another)
    tolerance: float = 1e-5


Builder = Callable[[Shape], Iterator[Case]]
