"""Where prompt chunks end, so that recurrent states can be kept where they will be looked up.

A state is only valid at its own position, so a chunk must end exactly where a checkpoint is wanted:
at the last endpoint below the prompt's end, at page ends, and at marks (ends of messages, places
where another request branched off). Everything here is arithmetic on positions (hybrid-cache.md
sections 1.2, 7 and 10).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["checkpoint_before", "plan_end", "turn_marks"]


def checkpoint_before(length: int, grid: int) -> int:
    """Return the last multiple of ``grid`` strictly below ``length``, 0 where there is none."""
    return max(length - 1, 0) // grid * grid


def plan_end(
    start: int,
    budget: int,
    total: int,
    *,
    page_size: int,
    unit_size: int,
    marks: Collection[int] = (),
) -> int:
    """Return where the chunk that begins at ``start`` ends.

    The end is above ``start`` and at most ``start + budget``; a chunk that begins inside a page
    does not cross the page's end; no mark and not the last endpoint below ``total`` is skipped.

    Args:
        start: Tokens already computed, below ``total``.
        budget: Tokens that may be computed, positive.
        total: Tokens to compute in all.
        page_size: Multiple of ``unit_size``.
        unit_size: Distance of endpoints.
        marks: Endpoints where a checkpoint is wanted.
    """
    end = min(start + budget, total)
    if end < total:
        for grid in (page_size, unit_size):
            if end // grid * grid > start:
                end = end // grid * grid
                break
    stops = [*marks, checkpoint_before(total, page_size), checkpoint_before(total, unit_size)]
    if start % page_size:
        stops.append((start // page_size + 1) * page_size)
    return min([stop for stop in stops if start < stop < end], default=end)


def turn_marks(
    tokens: Sequence[int], stop_ids: Collection[int], unit_size: int, count: int
) -> list[int]:
    """Return the endpoints at or below the last ``count`` message ends of a prompt.

    Args:
        tokens: The prompt.
        stop_ids: Ids that end a message.
        unit_size: Distance of endpoints.
        count: How many message ends to look at, the last ones first.
    """
    marks: list[int] = []
    left = count
    for position in range(len(tokens) - 1, -1, -1):
        if left == 0:
            break
        if tokens[position] in stop_ids:
            left -= 1
            mark = (position + 1) // unit_size * unit_size
            if mark and mark not in marks:
                marks.append(mark)
    return marks
