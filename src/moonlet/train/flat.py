"""Flat storage: parameters and gradients of a model as views of two contiguous buffers.

One buffer makes the gradient all-reduce, the norm, the momentum update and the weight decay
single operations. The order is Muon, AdamW with decay, AdamW without decay; each parameter
keeps its own shape and name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moonlet.core.errors import ConfigError
from moonlet.train.groups import Assignment, GroupKind

__all__ = ["FlatModel", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one parameter lies in the flat buffers."""

    assignment: Assignment
    start: int
    stop: int
    shape: torch.Size

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter-shaped view of a flat buffer."""
        return flat[self.start : self.stop].view(self.shape)


class FlatModel:
    """Moves a model's parameters into one buffer and binds their gradients to another.

    Args:
        model: Its parameters are re-pointed, so earlier aliases of their storage go stale.
            Every parameter must be float32 (the masters).
        assignments: One per parameter, from `assign_groups`.
    """

    def __init__(self, model: nn.Module, assignments: Sequence[Assignment]) -> None:
        parameters = dict(model.named_parameters())
        if [a.name for a in assignments] != list(parameters):
            raise ConfigError("assignments do not list the model's parameters in order")
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise ConfigError(f"{name} is {parameter.dtype}; masters must be float32")
        self.spans = _layout(parameters, assignments)
        total = sum(p.numel() for p in parameters.values())
        self.values = torch.empty(total)
        self.gradients = torch.zeros(total)
        for span in self.spans:
            parameter = parameters[span.assignment.name]
            view = span.view(self.values)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = span.view(self.gradients)

    def of_kind(self, *kinds: GroupKind) -> list[Span]:
        """Return the spans of the given groups, in storage order."""
        return [s for s in self.spans if s.assignment.kind in kinds]

    def range_of(self, *kinds: GroupKind) -> slice:
        """Return the contiguous range that the given adjacent groups occupy."""
        spans = self.of_kind(*kinds)
        return slice(spans[0].start, spans[-1].stop) if spans else slice(0, 0)

    def named_views(self, flat: Tensor, *kinds: GroupKind, base: int = 0) -> dict[str, Tensor]:
        """Return parameter-shaped views of a buffer that starts at position ``base``."""
        return {
            s.assignment.name: flat[s.start - base : s.stop - base].view(s.shape)
            for s in self.of_kind(*kinds)
        }


def _layout(
    parameters: Mapping[str, nn.Parameter], assignments: Sequence[Assignment]
) -> list[Span]:
    def rank(assignment: Assignment) -> int:
        if assignment.kind.is_muon:
            return 0
        return 1 if assignment.kind is GroupKind.ADAMW_DECAY else 2

    spans: list[Span] = []
    start = 0
    for assignment in sorted(assignments, key=rank):
        parameter = parameters[assignment.name]
        spans.append(Span(assignment, start, start + parameter.numel(), parameter.shape))
        start += parameter.numel()
    return spans
