"""Prompt lookup: what followed the newest ids when they occurred before (speculative.md 4).

For n from `prompt_lookup_max` down to `prompt_lookup_min`, the last n ids are looked up in the
sequence's own prompt and output; the ids after the chosen earlier occurrence are the draft. The
longest n wins. One hash table per n maps the n ids to where they end, so that a new id costs a few
insertions and a proposal a few lookups, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from moonlet.engine.request import Sequence
from moonlet.engine.speculative.config import SpeculativeConfig
from moonlet.engine.speculative.drafter import unseen

__all__ = ["NGramDrafter", "NGramIndex"]


class NGramIndex:
    """Where each run of ``low`` to ``high`` ids of one text ends.

    Args:
        low: Shortest run.
        high: Longest run.
        takes_latest: Continue the latest earlier occurrence instead of the earliest.
    """

    def __init__(self, low: int, high: int, *, takes_latest: bool = False) -> None:
        self.ids: list[int] = []
        self._takes_latest = takes_latest
        # keyed by the hash of the run, which takes less memory than the run; checked on use
        self._ends: dict[int, dict[int, int]] = {n: {} for n in range(high, low - 1, -1)}

    def extend(self, ids: SequenceOf[int]) -> None:
        """Append ids to the text."""
        text = self.ids
        for id in ids:
            # runs are entered one id late: the newest ending never finds itself
            end = len(text)
            for n, ends in self._ends.items():
                if end < n:
                    continue
                key = hash(tuple(text[end - n : end]))
                if self._takes_latest:
                    ends[key] = end
                else:
                    ends.setdefault(key, end)
            text.append(id)

    def follow(self, limit: int) -> list[int]:
        """Return at most ``limit`` ids that followed the newest ones before."""
        text = self.ids
        for n, ends in self._ends.items():
            newest = text[-n:]
            end = ends.get(hash(tuple(newest)))
            if end is not None and text[end - n : end] == newest:
                return text[end : end + limit]
        return []


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
        index.extend(unseen(sequence, len(index.ids)))
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
