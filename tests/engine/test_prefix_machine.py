"""Scheduler, manager and prefix index under random use, with a memory that is checked exactly."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonlet.engine.limits import PriorityClass
from tests.engine.symbolic import STOP, SymbolicEngine, next_token

TOTALS: Counter = Counter()
MAX_LEN = 60


class PrefixMachine(RuleBasedStateMachine):
    """Requests from a tree of shared prefixes; every way in which one can end or be disturbed."""

    @initialize(
        unit=st.sampled_from([1, 2, 4]),
        units_per_page=st.integers(1, 6),
        groups=st.integers(1, 3),
        seqs=st.integers(1, 4),
        budget=st.integers(4, 20),
        extra_pages=st.integers(0, 20),
        extra_states=st.integers(0, 12),
        is_unified=st.booleans(),
    )
    def start(self, unit, units_per_page, groups, seqs, budget, extra_pages, extra_states,
              is_unified):  # fmt: skip
        page = unit * units_per_page
        self.engine = SymbolicEngine(
            num_pages=-(-MAX_LEN // page) + extra_pages,
            num_states=seqs + extra_states,
            page_size=page,
            unit_size=unit,
            groups=groups,
            seqs=seqs,
            budget=max(budget, seqs),
            max_len=MAX_LEN,
            is_unified=is_unified,
            classes=(
                PriorityClass(name="first", max_prompt_tokens=12),
                PriorityClass(name="second", max_seqs=max(1, seqs - 1)),
            ),
        )
        self.histories: list[list[int]] = []

    @rule(
        tree=st.lists(st.integers(0, 1), max_size=6),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 19),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def submit(self, tree, length, max_tokens, salt):
        # branches part at multiples of 7, which is no endpoint of most geometries
        prompt = [tree[i // 7] if i // 7 < len(tree) else i % 3 for i in range(length)]
        for end in range(9, length, 10):
            prompt[end] = STOP
        self.engine.submit(prompt, max_tokens, salt)

    @precondition(lambda self: self.engine.finished)
    @rule(choice=st.integers(0, 1000), more=st.integers(0, 12), edit=st.none() | st.integers(0, 50))
    def go_on(self, choice, more, edit):
        """The next turn of a finished request, or the same with its history edited."""
        old = self.engine.finished[choice % len(self.engine.finished)]
        prompt = [*old.token_range(0, old.num_tokens), *([2] * more)]
        if edit is not None:
            prompt[edit % len(prompt)] = 1
        if len(prompt) < MAX_LEN:
            self.engine.submit(prompt, max_tokens=min(9, MAX_LEN - len(prompt)))

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule()
    def step_that_fails(self):
        self.engine.step(fails=True)

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule()
    def step_without_numbers(self):
        before = set(self.engine.cache._checkpoints)
        self.engine.step(is_finite=False)
        assert set(self.engine.cache._checkpoints) <= before

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice):
        unfinished = self.engine.scheduler.unfinished()
        self.engine.end(unfinished[choice % len(unfinished)], "abort")
        self.engine.counts["I10"] += 1

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(right=st.integers(0, 12), length=st.integers(1, 12))
    def window(self, right, length):
        """A verification window whose first drafts are what will come."""

        def draft(sequence, room):
            tokens = list(sequence.token_range(0, sequence.num_tokens))
            for position in range(min(length, room)):
                token = next_token(tokens)
                tokens.append(token if position < right else (token + 1) % 3)
            return tokens[sequence.num_tokens :]

        self.engine.step(draft=draft)

    @rule()
    def flush(self):
        self.engine.cache.clear()
        held = self.engine.cache.pages.held() | self.engine.cache.states.held()
        assert self.engine.cache.pages.cached() <= held

    @rule(count=st.integers(1, 6))
    def squeeze(self, count):
        """Take idle blocks away, as another request would."""
        cache = self.engine.cache
        count = min(count, cache.num_available(cache.pages))
        cache.release_pages(cache.allocate_pages(count))

    @invariant()
    def is_consistent(self):
        if hasattr(self, "engine"):
            self.engine.audit()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        for sequence in engine.finished:
            tokens = list(sequence.token_range(0, sequence.num_tokens))
            for index in range(len(sequence.prompt_ids), len(tokens)):
                assert tokens[index] == next_token(tokens[:index]), "the output differs from cold"
        engine.cache.clear()
        assert engine.cache.pages.num_free == engine.cache.pages.num_blocks
        assert engine.cache.states.num_free == engine.cache.states.num_blocks
        engine.counts["I10"] += 1
        engine.counts["preemptions"] += engine.scheduler.num_preemptions
        TOTALS.update(engine.counts)


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
