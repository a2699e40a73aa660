"""Loss guard: skips a step whose loss is not finite or far above its recent mean.

A skipped step changes no weight, no moment and no bias. The decision uses the loss of the whole
step (all processes), so every process takes it alike (training.md section 2.4).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from moonlet.core.errors import MoonletError

__all__ = ["LossGuard", "TrainingDiverged"]


class TrainingDiverged(MoonletError):
    """Too many steps in a row had an unusable loss."""


@dataclass(slots=True, kw_only=True)
class LossGuard:
    """Running mean of healthy losses and the count of skipped steps.

    Attributes:
        max_ratio: A loss above ``max_ratio`` times the running mean is refused.
        decay: Weight of the past in the running mean.
        max_skips: Consecutive skips that are still tolerated, minus one: the skip that reaches
            this number raises.
        mean: Running mean over healthy steps; None before the first.
        skips_in_a_row: Length of the present run of skipped steps.
        total_skips: Skipped steps of the whole run.
    """

    max_ratio: float = 1.5
    decay: float = 0.98
    max_skips: int = 5
    mean: float | None = None
    skips_in_a_row: int = 0
    total_skips: int = 0

    def accept(self, loss: float) -> bool:
        """Decide about one step and record the decision.

        Args:
            loss: Mean loss of the step over all processes; not finite where the gradient is not.

        Returns:
            Whether the step may be applied.

        Raises:
            TrainingDiverged: ``max_skips`` steps in a row were refused.
        """
        is_healthy = math.isfinite(loss) and (
            self.mean is None or loss <= self.max_ratio * self.mean
        )
        if is_healthy:
            self.mean = loss if self.mean is None else self._blend(loss)
            self.skips_in_a_row = 0
            return True
        self.skips_in_a_row += 1
        self.total_skips += 1
        if self.skips_in_a_row >= self.max_skips:
            raise TrainingDiverged(
                f"loss {loss} was refused {self.skips_in_a_row} steps in a row (recent mean "
                f"{self.mean}); lower the learning rate or resume from an earlier checkpoint"
            )
        return False

    def _blend(self, loss: float) -> float:
        assert self.mean is not None
        return self.decay * self.mean + (1 - self.decay) * loss

    def state(self) -> dict[str, Any]:
        """Return every field as JSON values."""
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Take over fields written by `state`."""
        for name, value in state.items():
            setattr(self, name, value)
