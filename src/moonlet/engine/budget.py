"""Prompt tokens of one step, split between short and long prompts."""

from __future__ import annotations

from collections.abc import Iterable

from moonlet.engine.request import Sequence

__all__ = ["StepBudget"]

# one part in so many is kept for long prompts
_LONG_SHARE = 4


class StepBudget:
    """Prompt tokens of one step: what short prompts may take, and what is kept for long ones.

    Attributes:
        left: Tokens not spent yet.
    """

    def __init__(self, tokens: int, unit_size: int) -> None:
        self.left = tokens
        self._whole = tokens
        self._unit = unit_size
        self._for_long = 0

    def is_long(self, sequence: Sequence) -> bool:
        """Whether the sequence needs more than one step of this budget."""
        return sequence.num_tokens - sequence.num_computed > self._whole

    def reserve(self, upcoming: Iterable[Sequence]) -> None:
        """Keep a part for long prompts where there are any."""
        if any(self.is_long(sequence) for sequence in upcoming):
            share = self._whole // _LONG_SHARE // self._unit * self._unit
            self._for_long = min(self._whole // 2, max(share, self._unit))

    def offer(self, sequence: Sequence) -> int:
        """Tokens that the sequence may compute before anything is left over."""
        return self._for_long if self.is_long(sequence) else self.left - self._for_long

    def take(self, sequence: Sequence, count: int) -> None:
        """Spend tokens on a sequence; a negative count gives them back."""
        self.left -= count
        if self.is_long(sequence):
            self._for_long = max(0, self._for_long - count)
