"""Two prompts with one beginning in one step: who computes it, and where their ways part."""

from __future__ import annotations

from collections.abc import Mapping

from moonlet.engine.budget import StepBudget
from moonlet.engine.request import Sequence
from moonlet.engine.step import ScheduledChunk

__all__ = ["producer_of", "stop_where_they_part"]


def producer_of(
    sequence: Sequence, common: int, producing: Mapping[bytes, Sequence], unit_size: int
) -> Sequence | None:
    """Return who computes the next unit of the sequence's prefix in this step, if any.

    Args:
        sequence: It waits.
        common: Position up to which its rows are there.
        producing: Who computes which unit, by chain hash.
        unit_size: Tokens per unit.
    """
    next_unit, keys = common // unit_size, sequence.chain.keys
    if next_unit >= min(len(keys), (sequence.num_tokens - 1) // unit_size):
        return None
    return producing.get(keys[next_unit])


def stop_where_they_part(
    sequence: Sequence,
    producer: Sequence,
    chunks: list[ScheduledChunk],
    budget: StepBudget,
    unit_size: int,
) -> None:
    """Ask the producer to keep its states where a waiting sequence branches off.

    Its chunk in ``chunks`` is cut there, and the budget gets the rest back.
    """
    keys, theirs = sequence.chain.keys, producer.chain.keys
    low, high = 0, min(len(keys), len(theirs), (sequence.num_tokens - 1) // unit_size)
    # chained hashes agree up to one place and nowhere after it
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    place = low * unit_size
    producer.marks.setdefault(place, "junction")
    for index, chunk in enumerate(chunks):
        if chunk.sequence is producer and chunk.start < place < chunk.stop:
            chunks[index] = ScheduledChunk(producer, chunk.start, place - chunk.start)
            budget.take(producer, place - chunk.stop)
