"""What a step costs by its number of rows, learned from the steps themselves.

Times of one machine jump when something else runs on it, so a number of rows keeps its last few
times and answers with their lower median. More rows never cost less (the curve is forced monotone);
between known numbers it is a line, beyond the last the last line goes on (speculative.md
section 7).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

__all__ = ["StepCosts"]

KEPT_TIMES = 9
# numbers of rows are told apart up to here, then in steps of as much
FINE_ROWS = 64

Point = tuple[int, float]


def _bucket(rows: int) -> int:
    return rows if rows <= FINE_ROWS else -(-rows // FINE_ROWS) * FINE_ROWS


class StepCosts:
    """Seconds of steps of one kind by their rows."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """Record one step."""
        bucket = _bucket(rows)
        times = self._times.get(bucket)
        if times is None:
            times = self._times[bucket] = deque(maxlen=KEPT_TIMES)
        times.append(seconds)
        self._typical[bucket] = statistics.median_low(times)

    def count(self, rows: int) -> int:
        """How many times are kept for that number of rows."""
        return len(self._times.get(_bucket(rows), ()))

    def at(self, rows: int) -> float | None:
        """Return the typical seconds of exactly that number of rows, if it was ever seen."""
        return self._typical.get(_bucket(rows))

    def curve(self, rows: Sequence[int], floor: Point | None = None) -> list[float] | None:
        """Return the seconds of several numbers of rows.

        Args:
            rows: Numbers of rows, at least those of the floor.
            floor: A known point that everything else lies right of and not below, e.g. the step
                without drafts.

        Returns:
            One per number, non-decreasing in it; None where nothing is known.
        """
        points = sorted(self._typical.items())
        if floor is not None:
            points = [floor, *(point for point in points if point[0] > floor[0])]
        if not points:
            return None
        known_rows, known_s = [points[0][0]], [points[0][1]]
        for number, seconds in points[1:]:
            known_rows.append(number)
            known_s.append(max(seconds, known_s[-1]))
        return [_between(known_rows, known_s, number) for number in rows]


def _between(known_rows: list[int], known_s: list[float], rows: int) -> float:
    right = bisect_left(known_rows, rows)
    if right == 0 or len(known_rows) == 1:
        return known_s[0]
    # beyond the last point its line goes on
    right = min(right, len(known_rows) - 1)
    left = right - 1
    slope = (known_s[right] - known_s[left]) / (known_rows[right] - known_rows[left])
    return known_s[left] + (rows - known_rows[left]) * slope
