"""How many drafts each sequence gets, so that windows never cost more than they bring.

A draft's worth is the probability that it and all before it are accepted; a window's cost is what
steps of that many rows took (`costs.py`). With R decoding sequences and the drafts of all of them
sorted by worth, the round takes the b most likely ones, where b is the argmax of

    (R + sum of the b largest survivals) / T[rows + b]

(speculative.md section 7) over a coarse grid of totals: every number of rows is recorded once
(`engine.replay`), so there shall be few of them. Survival of a request's j-th draft is alpha ** j;
alpha is estimated from every round in which something was proposed, also from those without drafts
in the batch: what was proposed is compared with what then came.

The guarantee does not rest on the model: a credit, in seconds, pays for everything that drafting
costs beyond plain steps: the drafter's own time, and every round that produced fewer tokens than
plain steps would have in its time. It grows by a small share of the time of plain steps and by what
good rounds gain; without credit nobody drafts nor looks anything up.

No clock is read here: seconds are arguments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from moonlet.engine.speculative.costs import StepCosts

__all__ = ["LengthControl", "Proposal", "Round", "StepRecord", "best_total", "share_out"]

# plain steps of a batch size before anything is drafted at that size, and rounds between them
MIN_PLAIN_STEPS = 3
MAX_ROUNDS_WITHOUT_PLAIN = 128
# measurements of a number of rows before its cost is believed
MIN_MEASUREMENTS = 3
# expected tokens, against plain steps, that make measuring worth while
MIN_GAIN = 1.2
# credit: share of plain time, and bounds in plain steps
CREDIT_SHARE = 0.005
FIRST_CREDIT = 8.0
MAX_CREDIT = 32.0
# what windows must promise, against plain steps: costs and acceptance are estimates
MARGIN = 1.05
# memory of the acceptance estimates: weight of the past per trial
REQUEST_DECAY = 0.95
ENGINE_DECAY = 0.99
PRIOR_TRIALS = 2.0
# totals of drafts that a step may have, beside as many as all sequences can have
TOTALS = (1, *(n << shift for shift in range(16) for n in (2, 3)))


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


class StepRecord(NamedTuple):
    """One step as the control sees it.

    Attributes:
        num_decoding: Sequences that decoded.
        seconds: What it took without the drafter's time.
        num_prompt_rows: Rows of prompts in it.
        num_drafts: Drafts in it.
        num_emitted: Tokens that decoding sequences got.
        num_skipped: Plain steps before it that were not measured.
        drafter_s: Time of looking for drafts, and of looking at what became of them.
        is_typical: False where it took longer for a reason that does not come again.
    """

    num_decoding: int
    seconds: float
    num_prompt_rows: int = 0
    num_drafts: int = 0
    num_emitted: int = 0
    num_skipped: int = 0
    drafter_s: float = 0.0
    is_typical: bool = True


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


def best_total(num_seqs: int, survivals: Sequence[float], seconds: Sequence[float]) -> int:
    """Return which number of drafts gives the most tokens per second; the first of equal ones.

    Args:
        num_seqs: R, tokens of a round without drafts.
        survivals: Sums of the largest survivals, for each number of drafts that may be taken.
        seconds: Of a round with so many.

    Returns:
        An index into both.
    """
    rates = [(num_seqs + tokens) / cost for tokens, cost in zip(survivals, seconds, strict=True)]
    return rates.index(max(rates))


def share_out(survivals: Sequence[Sequence[float]], total: int) -> list[int]:
    """Give each window its share of the ``total`` most likely drafts.

    Args:
        survivals: Per sequence, non-increasing, so that each share is the start of its window.
        total: Drafts to admit.
    """
    pairs = [(-value, owner) for owner, values in enumerate(survivals) for value in values]
    shares = [0] * len(survivals)
    for _, owner in sorted(pairs)[:total]:
        shares[owner] += 1
    return shares


class LengthControl:
    """Decides per step; learns from every step.

    Args:
        max_drafts: Drafts of a sequence at most.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._plain, self._windows, self._mixed = StepCosts(), StepCosts(), StepCosts()
        self._all = _Acceptance(ENGINE_DECAY)
        self._requests: dict[str, _Acceptance] = {}
        self._rounds_since_plain: dict[int, int] = {}
        self._credit_s: float | None = None

    @property
    def has_credit(self) -> bool:
        """Whether looking for drafts, or drafting, may cost something now."""
        return self._credit_s is None or self._credit_s > 0

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
        num_drafts = min(room, sum(p.num_drafts for p in proposals))
        plain_s = self._plain.at(num_decoding)
        if num_drafts <= 0 or plain_s is None or not self._may_draft(num_decoding):
            return nothing
        survivals = [self._survivals(p) for p in proposals]
        most_likely = sorted((v for values in survivals for v in values), reverse=True)
        sums = (0.0, *accumulate(most_likely))
        totals = self._totals(num_drafts, num_decoding)
        num_plain = num_decoding + num_prompt_rows
        rows = [num_plain + total for total in totals]
        if num_prompt_rows:
            seconds = self._mixed.curve(rows)
        else:
            seconds = self._windows.curve(rows, (num_decoding, plain_s))
        if seconds is None:
            return nothing
        seconds[0] /= MARGIN
        # drafts hold up the prompts of their step, whose rows therefore count as tokens
        total = totals[best_total(num_plain, [sums[t] for t in totals], seconds)]
        if not total and not num_prompt_rows:
            total = self._worth_measuring(num_decoding, totals[-1], sums[totals[-1]], plain_s)
        return share_out(survivals, total)

    def record(self, step: StepRecord, rounds: Sequence[Round] = ()) -> None:
        """Learn from a step.

        Args:
            step: What it had and took.
            rounds: What became of every proposal, whether its drafts were in the step or not.
        """
        for round in rounds:
            self._all.observe(round.num_matched, round.num_trials)
            own = self._requests.setdefault(round.request_id, _Acceptance(REQUEST_DECAY))
            own.observe(round.num_matched, round.num_trials)
        if step.is_typical:
            self._learn(step)
        plain_s = self._plain.at(step.num_decoding)
        if plain_s is not None:
            self._earn(CREDIT_SHARE * plain_s * step.num_skipped - step.drafter_s, plain_s)

    def _learn(self, step: StepRecord) -> None:
        """Take in what the step took and what it gained."""
        if step.num_prompt_rows:
            rows = step.num_decoding + step.num_prompt_rows + step.num_drafts
            self._mixed.observe(rows, step.seconds)
        elif step.num_drafts:
            self._record_window(step)
        elif step.num_decoding:
            self._plain.observe(step.num_decoding, step.seconds)
            self._rounds_since_plain[step.num_decoding] = 0
            self._earn(CREDIT_SHARE * step.seconds, step.seconds)

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

    def _survivals(self, proposal: Proposal) -> list[float]:
        rate = self.acceptance(proposal.request_id)
        return [rate**j for j in range(1, proposal.num_drafts + 1)]

    def _totals(self, num_drafts: int, num_decoding: int) -> list[int]:
        """Return the totals to choose from, 0 first."""
        full = self._max_drafts * num_decoding
        totals = [0, *TOTALS[: bisect_right(TOTALS, num_drafts)]]
        if num_drafts == full and totals[-1] < full:
            totals.append(full)
        return totals

    def _may_draft(self, num_decoding: int) -> bool:
        is_known = self._plain.count(num_decoding) >= MIN_PLAIN_STEPS
        is_recent = self._rounds_since_plain.get(num_decoding, 0) < MAX_ROUNDS_WITHOUT_PLAIN
        return is_known and is_recent and self.has_credit

    def _worth_measuring(
        self, num_decoding: int, total: int, expected: float, plain_s: float
    ) -> int:
        """Return ``total`` where only an unsure cost speaks against that many drafts, else 0."""
        gain = 1 + expected / num_decoding
        is_measured = self._windows.count(num_decoding + total) >= MIN_MEASUREMENTS
        # a full credit buys a fresh look at costs that were measured long ago
        is_rich = self._credit_s is not None and self._credit_s >= MAX_CREDIT * plain_s
        return total if gain >= MIN_GAIN and (is_rich or not is_measured) else 0

    def _record_window(self, step: StepRecord) -> None:
        num_decoding, rows = step.num_decoding, step.num_decoding + step.num_drafts
        self._windows.observe(rows, step.seconds)
        self._rounds_since_plain[num_decoding] = self._rounds_since_plain.get(num_decoding, 0) + 1
        plain_s, typical_s = self._plain.at(num_decoding), self._windows.at(rows)
        if plain_s is not None and typical_s is not None:
            # a step that something else held up is not charged beyond the usual cost
            cost_s = min(step.seconds, typical_s)
            self._earn(step.num_emitted * plain_s / num_decoding - cost_s, plain_s)

    def _earn(self, gain_s: float, plain_s: float) -> None:
        before = FIRST_CREDIT * plain_s if self._credit_s is None else self._credit_s
        most = MAX_CREDIT * plain_s
        self._credit_s = max(-most, min(before + gain_s, most))
