"""Suffix decoding: what most often followed the newest ids, here or in finished answers.

Two suffix trees are asked (`suffix_tree.py`): one of the sequence's own prompt and output, one of
the outputs of finished requests. The better scored draft wins, the own text on a tie. Knobs and
their names are vLLM's (speculative.md section 4).

Outputs are shared within a tenant only: how fast an answer comes would otherwise tell what others
were told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

from moonlet.engine.request import Sequence
from moonlet.engine.speculative.config import SpeculativeConfig
from moonlet.engine.speculative.drafter import unseen
from moonlet.engine.speculative.suffix_tree import SuffixTree

__all__ = ["SuffixDrafter"]

# ids of its own text that a sequence enters at a time
IDS_PER_CALL = 256
# ids of finished outputs that enter the shared tree with each observed sequence
LEARNED_PER_CALL = 16
# only the end of a longer output is remembered
MAX_REMEMBERED_IDS = 4096
# tenants whose outputs are remembered; the one that came first is dropped
MAX_TENANTS = 64


class _Own:
    """The tree of one unfinished sequence."""

    __slots__ = ("ids", "tree")

    def __init__(self, depth: int) -> None:
        self.tree = SuffixTree(depth)
        self.ids = self.tree.begin()


class _Remembered:
    """Outputs of finished requests of one tenant."""

    def __init__(self, depth: int, max_texts: int) -> None:
        self.tree = SuffixTree(depth)
        self._max_texts = max_texts
        self._texts: deque[list[int]] = deque()
        self._pending: deque[list[int]] = deque()
        self._num_entered = 0

    def add(self, ids: list[int]) -> None:
        """Queue an output; the one finished longest ago is dropped when there are too many."""
        self._pending.append(ids[-MAX_REMEMBERED_IDS:])
        # nobody may look for long; the first one may be half entered
        if len(self._pending) > self._max_texts + 1:
            del self._pending[1]

    def learn(self, count: int) -> None:
        """Enter at most ``count`` queued ids into the tree."""
        while count > 0 and self._pending:
            ids = self._pending[0]
            if not self._num_entered:
                if len(self._texts) == self._max_texts:
                    self.tree.remove(self._texts.popleft())
                self._texts.append(self.tree.begin())
            stop = min(len(ids), self._num_entered + count)
            for id in ids[self._num_entered : stop]:
                self.tree.append(id)
            count -= stop - self._num_entered
            self._num_entered = stop
            if stop == len(ids):
                self._pending.popleft()
                self._num_entered = 0


class SuffixDrafter:
    """A `Drafter` over suffix trees.

    Args:
        config: Knobs.
        tenant_of: Requests with the same value may draw on each other's outputs; all of them when
            absent.
    """

    def __init__(
        self, config: SpeculativeConfig, tenant_of: Callable[[Sequence], Hashable] | None = None
    ) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least = config.suffix_decoding_min_token_prob
        self._max_texts = config.suffix_decoding_max_cached_requests
        self._tenant_of = tenant_of or (lambda sequence: None)
        self._own: dict[str, _Own] = {}
        self._remembered: dict[Hashable, _Remembered] = {}

    def observe(self, sequence: Sequence) -> bool:
        """As in `Drafter`."""
        own = self._own.get(sequence.request_id)
        if own is None:
            own = self._own[sequence.request_id] = _Own(self._depth)
        for id in unseen(sequence, len(own.ids), IDS_PER_CALL):
            own.tree.append(id)
        remembered = self._remembered.get(self._tenant_of(sequence))
        if remembered is not None:
            remembered.learn(LEARNED_PER_CALL)
        return len(own.ids) == sequence.num_tokens

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """As in `Drafter`."""
        own = self._own[sequence.request_id]
        draft = own.tree.follow_growing(limit, self._factor, self._least)
        remembered = self._remembered.get(self._tenant_of(sequence))
        if remembered is not None:
            newest = own.ids[-self._depth :]
            other = remembered.tree.follow(newest, limit, self._factor, self._least)
            if other.score > draft.score:
                draft = other
        return draft.ids

    def forget(self, sequence: Sequence, *, has_ended_well: bool) -> None:
        """As in `Drafter`."""
        self._own.pop(sequence.request_id, None)
        if not (has_ended_well and self._max_texts and sequence.output_ids):
            return
        tenant = self._tenant_of(sequence)
        if tenant not in self._remembered:
            if len(self._remembered) == MAX_TENANTS:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[tenant] = _Remembered(self._depth, self._max_texts)
        self._remembered[tenant].add(sequence.output_ids)

    def tracked(self) -> set[str]:
        """As in `Drafter`."""
        return set(self._own)
