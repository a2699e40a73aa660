"""A gated activation with its parameters, callable and readable by fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["GatedActivation"]


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """``act(gate, up)`` of an MLP.

    Attributes:
        kind: ``situ`` or ``silu``, as ``hidden_act`` names it.
        apply: The operator, already bound to the parameters below.
        beta: Cap of the gate branch; unused by ``silu``.
        linear_beta: Cap of the up branch, or None for no cap.
    """

    kind: str
    apply: Callable[[Tensor, Tensor], Tensor]
    beta: float = 1.0
    linear_beta: float | None = None

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Activate; both arguments and the result have one shape and dtype."""
        return self.apply(gate, up)

    @property
    def number(self) -> int:
        """Number of the kind in the native interface."""
        return 1 if self.kind == "silu" else 0
