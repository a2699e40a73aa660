"""Prompt lookup: what followed the newest ids when they occurred before (speculative.md 4).

For n from `prompt_lookup_max` down to `prompt_lookup_min`, the last n ids are looked up in the
sequence's own prompt and output; the ids after the chosen earlier occurrence are the draft. The
longest n wins. One hash table per n maps the n ids to where they end, so that a new id costs a few
insertions and a proposal a few lookups, whatever the length of the text. Prompts, and what a
sleeping sequence said, enter many ids at a time.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from moonlet.engine.request import Sequence
from moonlet.engine.speculative.config import SpeculativeConfig
from moonlet.engine.speculative.drafter import unseen

__all__ = ["NGramDrafter", "NGramIndex"]

# ids that a sequence takes over at a time: about a millisecond
IDS_PER_CALL = 2048
# new ids from which on keys are made together
MIN_BULK = 16
# key of n ids: the sum of (id of the j-th last + 1) FACTOR ** j modulo 2 ** 64
FACTOR = 0x9E3779B97F4A7C15
MODULUS = 1 << 64


class NGramIndex:
    """Where each run of ``low`` to ``high`` ids of one text ends.

    Args:
        low: Shortest run.
        high: Longest run.
        takes_latest: Continue the latest earlier occurrence instead of the earliest.
    """

    def __init__(self, low: int, high: int, *, takes_latest: bool = False) -> None:
        self.ids: list[int] = []
        self._low, self._takes_latest = low, takes_latest
        self._powers = [pow(FACTOR, j, MODULUS) for j in range(high)]
        # by the key of the run, which takes less memory than the run; checked on use
        self._ends: dict[int, dict[int, int]] = {n: {} for n in range(high, low - 1, -1)}

    def extend(self, ids: SequenceOf[int]) -> None:
        """Append ids to the text."""
        # runs are entered one id late: the newest ending never finds itself
        first = len(self.ids)
        self.ids.extend(ids)
        if len(ids) >= MIN_BULK:
            self._enter_all(first)
            return
        for end in range(first, len(self.ids)):
            for n, key in self._keys(end):
                if self._takes_latest:
                    self._ends[n][key] = end
                else:
                    self._ends[n].setdefault(key, end)

    def follow(self, limit: int) -> list[int]:
        """Return at most ``limit`` ids that followed the newest ones before."""
        text = self.ids
        for n, key in reversed(self._keys(len(text))):
            end = self._ends[n].get(key)
            if end is not None and text[end - n : end] == text[-n:]:
                return text[end : end + limit]
        return []

    def _keys(self, end: int) -> list[tuple[int, int]]:
        """Return n and the key of the n ids before ``end``, for every n that is served."""
        keys, key = [], 0
        newest = self.ids[max(0, end - len(self._powers)) : end]
        for n, (id, power) in enumerate(zip(reversed(newest), self._powers, strict=False), start=1):
            key += (id + 1) * power
            if n >= self._low:
                keys.append((n, key % MODULUS))
        return keys

    def _enter_all(self, first: int) -> None:
        """Enter the runs that end before the ids from index ``first`` on."""
        stop, high = len(self.ids), len(self._powers)
        start = max(0, first - high)
        values = np.array(self.ids[start:stop], dtype=np.uint64) + np.uint64(1)
        keys = np.zeros(stop - first, dtype=np.uint64)
        ends = np.arange(first, stop)
        for n, power in enumerate(self._powers, start=1):
            has_run = ends >= n
            keys[has_run] += values[ends[has_run] - n - start] * np.uint64(power)
            if n < self._low:
                continue
            table, pairs = (
                self._ends[n],
                zip(keys[has_run].tolist(), ends[has_run].tolist(), strict=True),
            )
            if self._takes_latest:
                table.update(pairs)
                continue
            for key, end in pairs:
                table.setdefault(key, end)


class NGramDrafter:
    """A `Drafter` with one `NGramIndex` per unfinished sequence."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indices: dict[str, NGramIndex] = {}

    def observe(self, sequence: Sequence) -> bool:
        """As in `Drafter`."""
        index = self._indices.get(sequence.request_id)
        if index is None:
            config = self._config
            index = NGramIndex(
                config.prompt_lookup_min,
                config.prompt_lookup_max,
                takes_latest=config.prompt_lookup_occurrence == "latest",
            )
            self._indices[sequence.request_id] = index
        index.extend(unseen(sequence, len(index.ids), IDS_PER_CALL))
        return len(index.ids) == sequence.num_tokens

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """As in `Drafter`."""
        return self._indices[sequence.request_id].follow(limit)

    def forget(self, sequence: Sequence, *, has_ended_well: bool) -> None:
        """As in `Drafter`; nothing is kept for others."""
        self._indices.pop(sequence.request_id, None)

    def tracked(self) -> set[str]:
        """As in `Drafter`."""
        return set(self._indices)
