"""How many drafts each sequence gets, so that windows never cost more than they bring.

A draft's worth is the probability that it and all before it are accepted; a window's cost is what
steps of that many rows took (`costs.py`). With R decoding sequences and the drafts of all of them
sorted by worth, the round takes the b most likely ones, where b is the argmax of

    (R + sum of the b largest survivals) / T[rows + b]

(speculative.md section 7). Survival of a request's j-th draft is alpha ** j; alpha is estimated
from every round, also from those without drafts in the batch: what was proposed is compared with
what then came, so watching costs no forward pass. It does cost the drafter's own time, which this
control does not see: it compares windows with plain steps, and both draft.

The guarantee does not rest on the model: a credit, in seconds, pays for every round that produced
fewer tokens than plain steps would have in that time. It grows by a small share of the time of
plain steps and by what good rounds gain, and without credit nothing is drafted.

No clock is read here: seconds are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moonlet.engine.speculative.costs import StepCosts

__all__ = ["LengthControl", "Proposal", "Round", "best_total", "share_out"]

# plain steps of a batch size before anything is drafted at that size, and rounds between them
MIN_PLAIN_STEPS = 3
MAX_ROUNDS_WITHOUT_PLAIN = 128
# measurements of a number of rows before its cost is believed
MIN_MEASUREMENTS = 3
# expected tokens, against plain steps, that make measuring worth while
MIN_GAIN = 1.2
# credit: share of plain time, and bounds in plain steps
CREDIT_SHARE = 0.01
FIRST_CREDIT = 8.0
MAX_CREDIT = 32.0
# memory of the acceptance estimates: weight of the past per trial
REQUEST_DECAY = 0.95
ENGINE_DECAY = 0.99
PRIOR_TRIALS = 2.0


class Proposal(NamedTuple):
    """What one decoding sequence could try: at most ``num_drafts``."""

    request_id: str
    num_drafts: int


class Round(NamedTuple):
    """What became of one sequence's drafts.

    Attributes:
        request_id: Whose.
        num_matched: Proposed ids that came, up to the first that did not.
        num_trials: Proposed ids whose place has been decided: the matched ones and the first miss.
    """

    request_id: str
    num_matched: int
    num_trials: int


class _Acceptance:
    """Decayed counts of drafts that proved right."""

    __slots__ = ("_decay", "_matched", "_trials")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._matched = self._trials = 0.0

    def observe(self, num_matched: int, num_trials: int) -> None:
        past = self._decay**num_trials
        self._matched = past * self._matched + num_matched
        self._trials = past * self._trials + num_trials

    def rate(self, prior: float) -> float:
        return (self._matched + PRIOR_TRIALS * prior) / (self._trials + PRIOR_TRIALS)


def best_total(num_seqs: int, survivals: np.ndarray, seconds: np.ndarray) -> int:
    """Return how many drafts give the most tokens per second; the fewest of equally good ones.

    Args:
        num_seqs: R, tokens of a round without drafts.
        survivals: Of all drafts, sorted, largest first.
        seconds: Of a round with 0, 1, ... of them: one more than survivals.
    """
    tokens = num_seqs + np.concatenate(([0.0], np.cumsum(survivals)))
    return int(np.argmax(tokens / seconds))


def share_out(survivals: Sequence[np.ndarray], total: int) -> list[int]:
    """Give each window its share of the ``total`` most likely drafts.

    Args:
        survivals: Per sequence, non-increasing, so that each share is the start of its window.
        total: Drafts to admit.
    """
    owners = np.concatenate([np.full(len(s), i) for i, s in enumerate(survivals)])
    order = np.argsort(-np.concatenate(survivals), kind="stable")[:total]
    return np.bincount(owners[order], minlength=len(survivals)).tolist()


class LengthControl:
    """Decides per step; learns from every step."""

    def __init__(self) -> None:
        self._plain, self._windows, self._mixed = StepCosts(), StepCosts(), StepCosts()
        self._all = _Acceptance(ENGINE_DECAY)
        self._requests: dict[str, _Acceptance] = {}
        self._rounds_since_plain: dict[int, int] = {}
        self._credit_s: float | None = None

    def lengths(
        self, proposals: Sequence[Proposal], *, num_decoding: int, num_prompt_rows: int, room: int
    ) -> list[int]:
        """Return how many of its drafts each proposal may put into the step.

        Args:
            proposals: Of decoding sequences, some with no drafts at all.
            num_decoding: Sequences that decode in the step.
            num_prompt_rows: Rows of prompts in the same step.
            room: Drafts at most, all together.
        """
        nothing = [0] * len(proposals)
        survivals = [self._survivals(p) for p in proposals]
        num_drafts = min(room, sum(p.num_drafts for p in proposals))
        plain_s = self._plain.at(num_decoding)
        if num_drafts <= 0 or plain_s is None or not self._may_draft(num_decoding):
            return nothing
        most_likely = -np.sort(-np.concatenate(survivals))[:num_drafts]
        num_plain = num_decoding + num_prompt_rows
        rows = num_plain + np.arange(num_drafts + 1)
        if num_prompt_rows:
            seconds = self._mixed.curve(rows)
        else:
            seconds = self._windows.curve(rows, (num_decoding, plain_s))
        if seconds is None:
            return nothing
        # drafts hold up the prompts of their step, whose rows therefore count as tokens
        total = best_total(num_plain, most_likely, seconds)
        if not total and not num_prompt_rows:
            total = self._worth_measuring(num_decoding, most_likely, plain_s)
        return share_out(survivals, total)

    def record(
        self,
        rounds: Sequence[Round],
        *,
        num_decoding: int,
        num_prompt_rows: int,
        num_drafts: int,
        num_emitted: int,
        seconds: float,
    ) -> None:
        """Learn from a step.

        Args:
            rounds: What became of every proposal, whether its drafts were in the step or not.
            num_decoding: Sequences that decoded.
            num_prompt_rows: Rows of prompts in the step.
            num_drafts: Drafts in the step.
            num_emitted: Tokens that decoding sequences got.
            seconds: What the step took.
        """
        for round in rounds:
            self._all.observe(round.num_matched, round.num_trials)
            own = self._requests.setdefault(round.request_id, _Acceptance(REQUEST_DECAY))
            own.observe(round.num_matched, round.num_trials)
        if num_prompt_rows:
            self._mixed.observe(num_decoding + num_prompt_rows + num_drafts, seconds)
        elif num_drafts:
            self._record_window(num_decoding, num_drafts, num_emitted, seconds)
        elif num_decoding:
            self._plain.observe(num_decoding, seconds)
            self._rounds_since_plain[num_decoding] = 0
            self._earn(CREDIT_SHARE * seconds, seconds)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request."""
        self._requests.pop(request_id, None)

    def tracked(self) -> set[str]:
        """Ids of the requests that something is kept of."""
        return set(self._requests)

    def acceptance(self, request_id: str) -> float:
        """Return the estimated probability that a draft is accepted when all before it are."""
        everywhere = self._all.rate(0.5)
        own = self._requests.get(request_id)
        return everywhere if own is None else own.rate(everywhere)

    def _survivals(self, proposal: Proposal) -> np.ndarray:
        rate = self.acceptance(proposal.request_id)
        return rate ** np.arange(1, proposal.num_drafts + 1, dtype=np.float64)

    def _may_draft(self, num_decoding: int) -> bool:
        is_known = self._plain.count(num_decoding) >= MIN_PLAIN_STEPS
        is_recent = self._rounds_since_plain.get(num_decoding, 0) < MAX_ROUNDS_WITHOUT_PLAIN
        return is_known and is_recent and self._credit_s is not None and self._credit_s > 0

    def _worth_measuring(self, num_decoding: int, survivals: np.ndarray, plain_s: float) -> int:
        """Return all drafts where only an unsure cost speaks against them, else 0."""
        gain = 1 + float(survivals.sum()) / num_decoding
        is_measured = self._windows.count(num_decoding + len(survivals)) >= MIN_MEASUREMENTS
        # a full credit buys a fresh look at costs that were measured long ago
        is_rich = self._credit_s is not None and self._credit_s >= MAX_CREDIT * plain_s
        return len(survivals) if gain >= MIN_GAIN and (is_rich or not is_measured) else 0

    def _record_window(
        self, num_decoding: int, num_drafts: int, num_emitted: int, seconds: float
    ) -> None:
        rows = num_decoding + num_drafts
        self._windows.observe(rows, seconds)
        self._rounds_since_plain[num_decoding] = self._rounds_since_plain.get(num_decoding, 0) + 1
        plain_s, typical_s = self._plain.at(num_decoding), self._windows.at(rows)
        if plain_s is not None and typical_s is not None:
            # a step that something else held up is not charged beyond the usual cost
            cost_s = min(seconds, typical_s)
            self._earn(num_emitted * plain_s / num_decoding - cost_s, plain_s)

    def _earn(self, gain_s: float, plain_s: float) -> None:
        before = FIRST_CREDIT * plain_s if self._credit_s is None else self._credit_s
        most = MAX_CREDIT * plain_s
        self._credit_s = max(-most, min(before + gain_s, most))
