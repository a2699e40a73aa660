"""Sleeping: what does not pay is hardly looked at, and noticed when it starts to pay."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest

from moonlet.engine.emission import Emission
from moonlet.engine.request import EngineRequest, RequestState, Sequence
from moonlet.engine.speculative import Speculation
from moonlet.engine.speculative.control import CREDIT_SHARE, FIRST_CREDIT
from moonlet.engine.speculative.speculation import LONGEST_NAP, PATIENCE
from moonlet.engine.step import ScheduledChunk, Step
from tests.engine.drafting import speculate

PLAIN_S, ROW_S = 1.0, 0.05


class Watched:
    """Proposes what a function says and takes its time; counts how often it is asked."""

    def __init__(self, guess: Callable[[Sequence], SequenceOf[int]], clock: "Machine") -> None:
        self.num_asked = 0
        self._guess, self._clock = guess, clock

    def observe(self, sequence: Sequence) -> bool:
        self._clock.now += self._clock.lookup_s
        self.num_asked += 1
        return True

    def propose(self, sequence: Sequence, limit: int) -> SequenceOf[int]:
        return self._guess(sequence)[:limit]

    def forget(self, sequence: Sequence, *, has_ended_well: bool) -> None:
        pass

    def tracked(self) -> set[str]:
        return set()


class Machine:
    """Sequences that say 7 for ever, on a clock."""

    def __init__(
        self,
        guess: Callable[[Sequence], SequenceOf[int]],
        *,
        num_seqs: int = 1,
        lookup_s: float = 0.01,
        adaptive: bool = True,
    ) -> None:
        self.now, self.lookup_s = 0.0, lookup_s
        self.drafter = Watched(guess, self)
        self.speculation = Speculation(
            speculate(4, adaptive=adaptive),
            max_num_batched_tokens=64,
            stop_ids=frozenset(),
            vocab_size=16,
            drafter=self.drafter,
            clock=lambda: self.now,
        )
        self.sequences = [self.decoding(f"r{i}") for i in range(num_seqs)]
        self.num_drafts: list[int] = []

    @staticmethod
    def decoding(name: str) -> Sequence:
        made = Sequence(EngineRequest(request_id=name, prompt_ids=(1, 2)), max_model_len=100_000)
        made.state = RequestState.DECODE
        made.output_ids.append(7)
        return made

    def run(self, num_steps: int, prompts: SequenceOf[Sequence] = ()) -> None:
        for _ in range(num_steps):
            chunks = [ScheduledChunk(s, s.num_tokens - 1, 1) for s in self.sequences]
            chunks += [ScheduledChunk(s, 0, 2) for s in prompts]
            step = self.speculation.attach(Step(tuple(chunks)))
            total = sum(len(chunk.drafts) for chunk in step.chunks)
            self.num_drafts.append(total)
            self.now += PLAIN_S + ROW_S * total
            emissions = []
            for chunk in step.chunks[: len(self.sequences)]:
                accepted = [d for d in chunk.drafts if d == 7]
                chunk.sequence.output_ids.extend([*accepted, 7])
                emissions.append(Emission(chunk.sequence, [*accepted, 7], []))
            self.speculation.record(emissions)


def right(sequence: Sequence) -> list[int]:
    return [7] * 4


def wrong(sequence: Sequence) -> list[int]:
    return [3] * 4


def silent(sequence: Sequence) -> list[int]:
    return []


@pytest.mark.parametrize("guess", [silent, wrong])
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_what_does_not_pay_is_looked_at_rarely(
    guess: Callable[[Sequence], list[int]], num_seqs: int
) -> None:
    machine = Machine(guess, num_seqs=num_seqs, lookup_s=0.0)
    machine.run(2000)
    # naps grow to the longest within a few
    share = PATIENCE / (PATIENCE + LONGEST_NAP)
    assert machine.drafter.num_asked <= num_seqs * (2000 * share + 60)
    assert machine.drafter.num_asked >= num_seqs * 2000 * share * 0.8


def test_without_control_nobody_naps() -> None:
    machine = Machine(silent, adaptive=False)
    machine.run(200)
    assert machine.drafter.num_asked == 200


@pytest.mark.parametrize("lookup_s", [0.05, 0.5, 5.0])
def test_looking_stays_inside_the_credit(lookup_s: float) -> None:
    machine = Machine(silent, lookup_s=lookup_s)
    machine.run(4000)
    spent = machine.now - 4000 * PLAIN_S
    # what is there is spent on whole look-ups
    assert spent <= CREDIT_SHARE * 4000 * PLAIN_S + FIRST_CREDIT * PLAIN_S + lookup_s
    assert machine.drafter.num_asked > 0


def test_text_that_begins_to_repeat_is_noticed() -> None:
    machine = Machine(lambda s: right(s) if len(s.output_ids) > 1000 else [])
    machine.run(1000)
    assert sum(machine.num_drafts) == 0
    machine.run(LONGEST_NAP + 10)
    assert sum(machine.num_drafts) > 0
    machine.run(100)
    assert machine.num_drafts[-1] == 4


def test_a_new_prompt_wakes_the_others_up_only_if_their_naps_are_over() -> None:
    machine = Machine(silent)
    machine.run(PATIENCE + 2)
    asked = machine.drafter.num_asked
    other = Machine.decoding("new")
    other.state = RequestState.PREFILL
    machine.run(1, prompts=[other])
    assert machine.drafter.num_asked == asked
    other.state = RequestState.DECODE
    machine.sequences.append(other)
    machine.run(1)
    # the new one is looked at, the old one sleeps on
    assert machine.drafter.num_asked == asked + 1


def test_naps_end_with_their_request() -> None:
    machine = Machine(silent)
    machine.run(20)
    with pytest.raises(AssertionError, match="nap"):
        machine.speculation.check(set())
    machine.speculation.forget(machine.sequences[0], has_ended_well=True)
    machine.speculation.check(set())
