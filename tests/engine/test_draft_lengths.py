"""Draft lengths from measured costs and acceptance; every second here is an argument."""

import random
from itertools import accumulate

import pytest

from moonlet.engine.speculative.control import (
    MAX_ROUNDS_WITHOUT_PLAIN,
    MIN_PLAIN_STEPS,
    LengthControl,
    Proposal,
    Round,
    StepRecord,
    best_total,
    share_out,
)
from moonlet.engine.speculative.costs import StepCosts

# ---- the numbers of speculative.md section 7 ---------------------------------------------------

SURVIVALS = [[0.9, 0.72, 0.36], [0.8, 0.4, 0.1]]


def test_the_confidence_budget_of_the_spec() -> None:
    sums = [0.0, *accumulate(sorted(SURVIVALS[0] + SURVIVALS[1], reverse=True))]
    seconds = [0.4 + 1 + 0.15 * (2 + b) for b in range(7)]
    rates = [(2 + tokens) / cost for tokens, cost in zip(sums, seconds, strict=True)]
    expected = [1.1765, 1.5676, 1.8500, 2.0558, 2.0957, 2.1143, 2.0308]
    assert rates == pytest.approx(expected, abs=5e-5)
    assert best_total(2, sums, seconds) == 5
    assert share_out(SURVIVALS, 5) == [3, 2]


@pytest.mark.parametrize(("total", "shares"), [(0, [0, 0]), (1, [1, 0]), (3, [2, 1]), (6, [3, 3])])
def test_the_most_likely_drafts_go_first(total: int, shares: list[int]) -> None:
    assert share_out(SURVIVALS, total) == shares


def test_equally_good_totals_take_the_fewest() -> None:
    assert best_total(1, [0.0, 0.5, 0.5], [1.0, 1.5, 1.5]) == 0


# ---- costs -------------------------------------------------------------------------------------


def test_costs_are_a_monotone_line_through_typical_times() -> None:
    costs = StepCosts()
    assert costs.curve([1]) is None
    assert costs.at(4) is None
    for seconds in (9.0, 4.0, 5.0, 4.5):
        costs.observe(4, seconds)
    # one slow step does not count, the lower of the middle ones does
    assert costs.at(4) == 4.5
    assert costs.count(4) == 4
    costs.observe(8, 3.0)
    costs.observe(10, 6.5)
    assert costs.curve([2, 4, 8, 9, 10, 12]) == [4.5, 4.5, 4.5, 5.5, 6.5, 8.5]
    assert costs.curve([4, 6, 8], floor=(4, 1.0)) == [1.0, 2.0, 3.0]


def test_old_times_are_forgotten() -> None:
    costs = StepCosts()
    for _ in range(9):
        costs.observe(2, 1.0)
    for _ in range(9):
        costs.observe(2, 5.0)
    assert costs.at(2) == 5.0


# ---- a machine with a clock --------------------------------------------------------------------


class Machine:
    """Runs rounds under a control: costs are a function, acceptance a chance."""

    def __init__(
        self, *, window_s: float = 1.2, row_s: float = 0.02, num_seqs: int = 1, wanted: int = 4
    ) -> None:
        self.control = LengthControl(wanted)
        self.window_s, self.row_s, self.num_seqs, self.wanted = window_s, row_s, num_seqs, wanted
        self.elapsed = 0.0
        self.tokens = 0
        self.lengths: list[int] = []
        self._random = random.Random(0)

    def run(self, num_steps: int, chance: float) -> None:
        for _ in range(num_steps):
            self._step(chance)

    def _step(self, chance: float) -> None:
        names = [f"r{s}" for s in range(self.num_seqs)]
        proposals = [Proposal(name, self.wanted) for name in names]
        lengths = self.control.lengths(
            proposals, num_decoding=self.num_seqs, num_prompt_rows=0, room=1000
        )
        rounds, emitted = [], 0
        for name, length in zip(names, lengths, strict=True):
            accepted = 0
            while accepted < self.wanted and self._random.random() < chance:
                accepted += 1
            num_tokens = min(accepted, length) + 1
            matched = min(accepted, num_tokens)
            rounds.append(Round(name, matched, min(matched + 1, num_tokens, self.wanted)))
            emitted += num_tokens
        total = sum(lengths)
        seconds = self.window_s + self.row_s * total if total else 1.0
        step = StepRecord(self.num_seqs, seconds, num_drafts=total, num_emitted=emitted)
        self.control.record(step, rounds)
        self.elapsed += seconds
        self.tokens += emitted
        self.lengths.append(total)

    @property
    def speed(self) -> float:
        """Tokens per second, against 1 per second and sequence of plain steps."""
        return self.tokens / self.elapsed / self.num_seqs


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_everything_is_drafted_where_everything_is_accepted(num_seqs: int) -> None:
    machine = Machine(num_seqs=num_seqs)
    machine.run(300, 1.0)
    assert machine.lengths[:MIN_PLAIN_STEPS] == [0] * MIN_PLAIN_STEPS
    late = machine.lengths[100:]
    assert late.count(4 * num_seqs) >= len(late) - 2
    assert machine.speed > 3


def test_nothing_is_drafted_where_nothing_was_accepted_for_long() -> None:
    machine = Machine()
    machine.run(400, 0.0)
    assert sum(machine.lengths[100:]) == 0
    assert sum(machine.lengths[:100]) > 0


@pytest.mark.parametrize("window_s", [1.0, 1.2, 3.0, 20.0])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8])
def test_never_slower_than_plain_steps(window_s: float, chance: float) -> None:
    machine = Machine(window_s=window_s)
    machine.run(4000, chance)
    assert machine.speed >= 0.98


def test_a_dear_window_needs_more_acceptance() -> None:
    cheap, dear = Machine(window_s=1.2), Machine(window_s=3.0)
    for machine in (cheap, dear):
        machine.run(400, 0.6)
    assert sum(cheap.lengths[200:]) > 0
    assert sum(dear.lengths[200:]) == 0


def test_fewer_rows_where_rows_are_dear() -> None:
    machine = Machine(window_s=1.0, row_s=0.3, wanted=8)
    machine.run(600, 0.7)
    late = [length for length in machine.lengths[300:] if length]
    # 0.7 ** j pays for 0.3 of a step while j is small only
    assert late
    assert max(late) <= 4


def test_watching_plain_steps_brings_drafts_back() -> None:
    machine = Machine()
    machine.run(400, 0.0)
    machine.run(60, 1.0)
    assert machine.lengths[-1] == 4


def test_what_was_measured_on_a_busy_machine_is_measured_again() -> None:
    machine = Machine(window_s=30.0)
    machine.run(300, 1.0)
    assert machine.lengths[-1] == 0
    machine.window_s = 1.2
    machine.run(8000, 1.0)
    assert machine.lengths[-1] == 4
    assert machine.speed > 1.2


def test_plain_steps_are_measured_from_time_to_time() -> None:
    machine = Machine()
    machine.run(3 * MAX_ROUNDS_WITHOUT_PLAIN, 1.0)
    assert 0 in machine.lengths[MAX_ROUNDS_WITHOUT_PLAIN:]


def test_a_new_request_starts_from_what_others_had() -> None:
    control = LengthControl(4)
    assert control.acceptance("new") == 0.5
    for _ in range(50):
        control.record(StepRecord(1, 1.0), [Round("old", 0, 1)])
    assert control.acceptance("new") < 0.05
    control.record(StepRecord(1, 1.0), [Round("new", 4, 4)])
    assert control.acceptance("new") > 0.6 > 0.1 > control.acceptance("old")
    assert control.tracked() == {"old", "new"}
    control.forget("new")
    assert control.tracked() == {"old"}


def test_room_bounds_the_drafts_of_all() -> None:
    machine = Machine(num_seqs=3)
    machine.run(50, 1.0)
    proposals = [Proposal(f"r{s}", 4) for s in range(3)]
    arguments = {"num_decoding": 3, "num_prompt_rows": 0}
    assert sum(machine.control.lengths(proposals, **arguments, room=7)) == 6
    assert machine.control.lengths(proposals, **arguments, room=0) == [0, 0, 0]
    proposals[1] = Proposal("r1", 0)
    assert machine.control.lengths(proposals, **arguments, room=100) == [4, 0, 4]


def test_steps_with_prompts_have_costs_of_their_own() -> None:
    machine = Machine()
    machine.run(50, 1.0)
    proposals = [Proposal("r0", 4)]
    arguments = {"num_decoding": 1, "num_prompt_rows": 32, "room": 100}
    assert machine.control.lengths(proposals, **arguments) == [0]
    # rows cost nothing beyond a fixed time
    machine.control.record(StepRecord(1, 2.0, num_prompt_rows=32))
    assert machine.control.lengths(proposals, **arguments) == [4]
    # a row costs twice what it costs on average
    for _ in range(9):
        machine.control.record(StepRecord(1, 4.0, num_prompt_rows=48))
    assert machine.control.lengths(proposals, **arguments) == [0]
