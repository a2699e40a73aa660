"""Learning-rate schedules: linear warm-up, then cosine to a floor (training.md section 2.4).

    w = ceil(warmup_fraction * total)
    lr(t) = lr_max * t / w                                              t < w
    lr(t) = lr_min + 0.5 (lr_max - lr_min) (1 + cos(pi (t - w) / (total - w)))   t >= w

Steps are counted from 1 here, so the first update already moves the weights and the last one
uses exactly ``lr_min``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moonlet.core.errors import ConfigError

__all__ = ["CosineSchedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineSchedule:
    """Warm-up and cosine decay over a fixed number of steps.

    Attributes:
        peak_lr: Rate at the end of the warm-up.
        total_steps: Updates in the whole run.
        warmup_fraction: Share of the steps spent warming up, in [0, 1).
        floor_ratio: ``lr_min / lr_max``, in [0, 1].
    """

    peak_lr: float
    total_steps: int
    warmup_fraction: float = 0.01
    floor_ratio: float = 0.1

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.peak_lr <= 0:
            raise ConfigError(f"schedule.peak_lr is {self.peak_lr}; it must be positive")
        if self.total_steps < 1:
            raise ConfigError(f"schedule.total_steps is {self.total_steps}; at least 1")
        if not 0 <= self.warmup_fraction < 1:
            raise ConfigError(
                f"schedule.warmup_fraction is {self.warmup_fraction}; it must be in [0, 1)"
            )
        if not 0 <= self.floor_ratio <= 1:
            raise ConfigError(f"schedule.floor_ratio is {self.floor_ratio}; it must be in [0, 1]")

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return math.ceil(self.warmup_fraction * self.total_steps)

    def lr(self, step: int) -> float:
        """Return the rate of update number ``step``.

        Args:
            step: Update number, from 1 to ``total_steps``; later steps keep the floor.
        """
        warmup = self.warmup_steps
        if step < warmup:
            return self.peak_lr * step / warmup
        if step >= self.total_steps:
            return self.peak_lr * self.floor_ratio
        floor = self.peak_lr * self.floor_ratio
        turn = (step - warmup) / (self.total_steps - warmup)
        return floor + 0.5 * (self.peak_lr - floor) * (1 + math.cos(math.pi * turn))
