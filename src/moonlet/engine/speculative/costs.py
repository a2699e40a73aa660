"""What a step costs by its number of rows, learned from the steps themselves.

Times of one machine jump when something else runs on it, so a number of rows keeps its last few
times and answers with their lower median. More rows never cost less (the curve is forced monotone);
between known numbers it is a line, beyond the last the last line goes on (speculative.md
section 7).
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np

__all__ = ["StepCosts"]

KEPT_TIMES = 9
# numbers of rows are told apart up to here, then in steps of as much
FINE_ROWS = 64


def _bucket(rows: int) -> int:
    return rows if rows <= FINE_ROWS else -(-rows // FINE_ROWS) * FINE_ROWS


class StepCosts:
    """Seconds of steps of one kind by their rows."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._curve: tuple[np.ndarray, np.ndarray] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Record one step."""
        self._times.setdefault(_bucket(rows), deque(maxlen=KEPT_TIMES)).append(seconds)
        self._curve = None

    def count(self, rows: int) -> int:
        """How many times are kept for that number of rows."""
        return len(self._times.get(_bucket(rows), ()))

    def at(self, rows: int) -> float | None:
        """Return the typical seconds of exactly that number of rows, if it was ever seen."""
        times = self._times.get(_bucket(rows))
        return statistics.median_low(times) if times else None

    def curve(self, rows: np.ndarray, floor: tuple[int, float] | None = None) -> np.ndarray | None:
        """Return the seconds of several numbers of rows.

        Args:
            rows: Whole numbers, at least those of the floor.
            floor: A known point that everything else lies right of and not below, e.g. the step
                without drafts.

        Returns:
            float64, one per number, non-decreasing; None where nothing is known.
        """
        known_rows, known_seconds = self._known()
        if floor is not None:
            is_right = known_rows > floor[0]
            known_rows = np.concatenate(([floor[0]], known_rows[is_right]))
            known_seconds = np.concatenate(([floor[1]], known_seconds[is_right]))
        if not len(known_rows):
            return None
        known_seconds = np.maximum.accumulate(known_seconds)
        seconds = np.interp(rows, known_rows, known_seconds)
        if len(known_rows) > 1:
            (x0, x1), (y0, y1) = known_rows[-2:], known_seconds[-2:]
            seconds += np.maximum(0, rows - x1) * (y1 - y0) / (x1 - x0)
        return seconds

    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        if self._curve is None:
            pairs = sorted((rows, statistics.median_low(t)) for rows, t in self._times.items())
            table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
            self._curve = (table[:, 0], table[:, 1])
        return self._curve
