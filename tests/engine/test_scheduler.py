"""The scheduler as a state machine: no slot or page lost, every request ends, steady progress."""

import ast
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import moonlet.engine.scheduler as scheduler_module
from moonlet.core.errors import ConfigError
from moonlet.engine.cache.pages import PagePool
from moonlet.engine.cache.slots import SlotPool
from moonlet.engine.request import EngineRequest, RequestState, SamplingParams, Sequence
from moonlet.engine.scheduler import Scheduler, SchedulerLimits, Step

MAX_LEN = 24


def make_scheduler(
    seqs: int = 2, budget: int = 8, num_pages: int = 12, page_size: int = 4
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=MAX_LEN
    )
    return Scheduler(limits, SlotPool(seqs), PagePool(num_pages, page_size))


def make_sequence(name: str, prompt: int, max_tokens: int | None = None) -> Sequence:
    request = EngineRequest(
        request_id=name,
        prompt_ids=range(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    return Sequence(request, max_model_len=MAX_LEN)


def run_step(scheduler: Scheduler) -> Step:
    """Run one step as the engine does, ending sequences at their limit."""
    step = scheduler.schedule()
    assert step is not None
    owed = [chunk.sequence for chunk in step.chunks if chunk.needs_logits]
    scheduler.advance(step)
    for sequence in owed:
        scheduler.append(sequence, 7)
        if sequence.num_tokens == sequence.max_total_tokens:
            scheduler.finish(sequence, "length")
    scheduler.check()
    return step


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, steps, aborts and failed steps on pools as tight as they may be."""

    @initialize(
        seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 9),
        page_size=st.integers(1, 7),
        extra_pages=st.integers(0, 20),
    )
    def start(self, seqs: int, extra_budget: int, page_size: int, extra_pages: int) -> None:
        num_pages = -(-MAX_LEN // page_size) + extra_pages
        self.scheduler = make_scheduler(seqs, seqs + extra_budget, num_pages, page_size)
        self.sequences: list[Sequence] = []
        self.fed: dict[str, list[int]] = {}

    @rule(prompt=st.integers(1, MAX_LEN - 1), max_tokens=st.none() | st.integers(1, MAX_LEN))
    def submit(self, prompt: int, max_tokens: int | None) -> None:
        sequence = make_sequence(f"r{len(self.sequences)}", prompt, max_tokens)
        self.sequences.append(sequence)
        self.fed[sequence.request_id] = []
        self.scheduler.add(sequence)

    def checked_step(self) -> Step:
        scheduler, limits = self.scheduler, self.scheduler.limits
        oldest_waiting = [s for s in scheduler.unfinished() if s.state is RequestState.WAITING]
        step = scheduler.schedule()
        assert step is not None, "unfinished sequences but nothing to run"
        assert 1 <= step.num_tokens <= limits.max_num_batched_tokens
        assert list(step.admitted) == oldest_waiting[: len(step.admitted)], "not first come"
        assert len({chunk.sequence for chunk in step.chunks}) == len(step.chunks)
        decoding = [s for s in scheduler.unfinished() if s.state is RequestState.DECODE]
        assert {c.sequence for c in step.chunks if c.is_decode} == set(decoding)
        for chunk in step.chunks:
            assert chunk.num_tokens >= 1
            fed = self.fed[chunk.sequence.request_id]
            assert chunk.start == len(fed)
            stop = chunk.start + chunk.num_tokens
            fed.extend(chunk.sequence.token_range(chunk.start, stop))
        return step

    @precondition(lambda self: self.scheduler.has_work)
    @rule(stops=st.lists(st.booleans(), min_size=8, max_size=8))
    def step(self, stops: list[bool]) -> None:
        step = self.checked_step()
        owed = [chunk.sequence for chunk in step.chunks if chunk.needs_logits]
        self.scheduler.advance(step)
        for sequence, stop in zip(owed, stops, strict=False):
            self.scheduler.append(sequence, 100 + sequence.num_tokens)
            if stop or sequence.num_tokens == sequence.max_total_tokens:
                self.scheduler.finish(sequence, "stop" if stop else "length")

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def failing_step(self) -> None:
        step = self.checked_step()
        for chunk in step.chunks:
            self.scheduler.finish(chunk.sequence, "error")

    @precondition(lambda self: self.scheduler.has_work)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        unfinished = self.scheduler.unfinished()
        self.scheduler.finish(unfinished[choice % len(unfinished)], "abort")

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            for sequence in self.sequences:
                fed = self.fed[sequence.request_id]
                tokens = list(sequence.token_range(0, sequence.num_tokens))
                assert fed == tokens[: len(fed)], "a sequence was fed foreign tokens"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(MAX_LEN * (len(self.sequences) + 1)):
            if not self.scheduler.has_work:
                break
            self.step([False] * 8)
        assert all(sequence.state.is_final for sequence in self.sequences), "a request never ends"
        assert self.scheduler.slots.num_free == self.scheduler.slots.num_slots
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_pages


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_long_prompt_is_cut_while_others_decode() -> None:
    scheduler = make_scheduler(seqs=2, budget=4)
    scheduler.add(make_sequence("short", 2, 8))
    run_step(scheduler)
    scheduler.add(make_sequence("long", 10, 2))
    shapes = [[c.num_tokens for c in run_step(scheduler).chunks] for _ in range(4)]
    assert shapes == [[1, 3], [1, 3], [1, 3], [1, 1]]


def test_several_prompts_share_a_step() -> None:
    scheduler = make_scheduler(seqs=4, budget=8, num_pages=40)
    for name in "abc":
        scheduler.add(make_sequence(name, 3, 2))
    assert [c.num_tokens for c in run_step(scheduler).chunks] == [3, 3, 2]


def test_two_prompts_that_fit_only_alone_both_finish() -> None:
    scheduler = make_scheduler(seqs=2, budget=8, num_pages=6)
    sequences = [make_sequence(name, 20) for name in "ab"]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work:
        assert len(run_step(scheduler).chunks) == 1
    assert [s.num_tokens for s in sequences] == [MAX_LEN, MAX_LEN]


def test_small_request_does_not_overtake_a_big_one() -> None:
    scheduler = make_scheduler(seqs=3, budget=8, num_pages=7)
    for name, prompt in (("first", 12), ("big", 20), ("small", 1)):
        scheduler.add(make_sequence(name, prompt, 4))
    run_step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_nothing_to_do_gives_no_step() -> None:
    assert make_scheduler().schedule() is None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len"),
    ],
)
def test_contradicting_limits_are_refused(limits: dict[str, int], message: str) -> None:
    good = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    with pytest.raises(ConfigError, match=message):
        SchedulerLimits(**{**good, **limits})


def test_pools_that_cannot_hold_one_request_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold one request"):
        make_scheduler(num_pages=5)
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=8)
    with pytest.raises(ConfigError, match="state slots"):
        Scheduler(limits, SlotPool(1), PagePool(9, 4))


@pytest.mark.parametrize("file", ["scheduler", "request", "stopping", "cache/slots", "cache/pages"])
def test_bookkeeping_imports_no_torch(file: str) -> None:
    folder = Path(scheduler_module.__file__).parent
    tree = ast.parse((folder / f"{file}.py").read_text(encoding="utf-8"))
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names
    heavy = ("torch", "numpy", "moonlet.model", "moonlet.kernels")
    assert not {name for name in names if name.startswith(heavy)}
