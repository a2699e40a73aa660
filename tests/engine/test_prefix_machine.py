"""Scheduler, manager, prefix index and external pool under random use, checked exactly.

Every invariant I1 to I12 of hybrid-cache.md section 15 is counted where it is asserted:

    I1, I3      contents and groups of everything findable      `SymbolicMemory.check`
    I2, I6      hits                                            `SymbolicEngine._check_hit`
    I4          conservation of blocks                          `SymbolicEngine.audit`
    I5, I7      rows written, and the positions they start at   `SymbolicMemory.execute`
    I8, I9      steps, and tokens against a cold run            `SymbolicEngine.step`, `teardown`
    I10         requests that ended early                       `abort`, `step_that_fails`
    I11         prefixes of the same tokens that are foreign    `SymbolicEngine._count_strangers`
    I12         checkpoints of the pool                         `assert_external`, `tear`, `restart`

`python -m pytest --long tests/engine/test_prefix_machine.py -s` prints the counts of a long run.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.statistics import collector

from moonlet.core.errors import ConfigError
from moonlet.engine.cache.chain import MediaSpan
from moonlet.engine.limits import PriorityClass
from moonlet.engine.request import RequestState
from tests.engine.symbolic import (
    STOP,
    PromptPool,
    SymbolicEngine,
    assert_external,
    geometry_identity,
    next_token,
    salt_of,
    seen,
)

TOTALS: Counter = Counter()
MAX_LEN = 60
IMAGES = tuple(MediaSpan(start=s, stop=s + 6, digest=bytes([s]) * 32) for s in (3, 9))


class PrefixMachine(RuleBasedStateMachine):
    """Requests from a tree of shared prefixes; every way in which one can end or be disturbed."""

    directory: tempfile.TemporaryDirectory | None = None

    @initialize(
        unit=st.sampled_from([1, 2, 4]),
        units_per_page=st.integers(1, 6),
        groups=st.integers(1, 3),
        seqs=st.integers(1, 4),
        budget=st.integers(4, 20),
        extra_pages=st.integers(0, 20),
        extra_states=st.integers(0, 12),
        is_unified=st.booleans(),
        host_bytes=st.sampled_from([None, 0, 700, 1 << 20]),
        disk_bytes=st.sampled_from([None, 4000, 1 << 20]),
    )
    def start(self, unit, units_per_page, groups, seqs, budget, extra_pages, extra_states,
              is_unified, host_bytes, disk_bytes):  # fmt: skip
        page = unit * units_per_page
        # the pool stores one state per checkpoint, as an engine has one group
        has_pool = groups == 1 and host_bytes is not None and bool(host_bytes or disk_bytes)
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
        self.pool_options = {"host_bytes": host_bytes}
        if has_pool and disk_bytes is not None:
            self.directory = tempfile.TemporaryDirectory()
            self.pool_options |= {"directory": self.directory.name, "disk_bytes": disk_bytes}
        if has_pool:
            self.engine.attach(self.open_pool())

    def open_pool(self, fingerprint="toy"):
        identity = geometry_identity(self.engine.cache.unit_size, fingerprint)
        return PromptPool(identity, **self.pool_options)

    # ---- requests ------------------------------------------------------------------------------

    @rule(
        tree=st.lists(st.integers(0, 1), max_size=6),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 19),
        salt=st.sampled_from(["", "", "tenant"]),
        media=st.sampled_from([(), (), IMAGES[:1], IMAGES[1:], IMAGES]),
    )
    def submit(self, tree, length, max_tokens, salt, media):
        # branches part at multiples of 7, which is no endpoint of most geometries
        prompt = [tree[i // 7] if i // 7 < len(tree) else i % 3 for i in range(length)]
        for end in range(9, length, 10):
            prompt[end] = STOP
        media = tuple(image for image in media if image.stop <= length)
        self.engine.submit(prompt, max_tokens, salt, media=media)

    @precondition(lambda self: self.engine.finished)
    @rule(choice=st.integers(0, 1000), salt=st.sampled_from(["", "tenant"]),
          media=st.sampled_from([(), IMAGES[:1]]))  # fmt: skip
    def as_another(self, choice, salt, media):
        """The prompt of a finished request, of another tenant or with another image."""
        prompt = self.engine.finished[choice % len(self.engine.finished)].prompt_ids
        media = tuple(image for image in media if image.stop <= len(prompt))
        self.engine.submit(prompt, 1, salt, media=media)

    @precondition(lambda self: self.engine.finished)
    @rule(choice=st.integers(0, 1000), more=st.integers(0, 12), edit=st.none() | st.integers(0, 50))
    def go_on(self, choice, more, edit):
        """The next turn of a finished request, or the same with its history edited."""
        old = self.engine.finished[choice % len(self.engine.finished)]
        prompt = [*old.token_range(0, old.num_tokens), *([2] * more)]
        if edit is not None:
            prompt[edit % len(prompt)] = 1
        if len(prompt) < MAX_LEN:
            request = old.request
            room = min(9, MAX_LEN - len(prompt))
            self.engine.submit(prompt, room, request.cache_salt, media=request.media)

    # ---- steps ---------------------------------------------------------------------------------

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule()
    def step_that_fails(self):
        before = len(self.engine.finished)
        self.engine.step(fails=True)
        self.engine.audit()
        self.engine.counts["I10"] += len(self.engine.finished) - before

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
        self.engine.audit()
        self.engine.counts["I10"] += 1

    @precondition(lambda self: self.engine.scheduler.num_running)
    @rule(choice=st.integers(0, 1000))
    def preempt(self, choice):
        """Take the memory of a running request away, whoever it is."""
        running = list(self.engine.scheduler._running.values())
        victim = running[choice % len(running)]
        self.engine.scheduler._preempt(victim)
        assert victim.state is RequestState.WAITING

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(right=st.integers(0, 12), length=st.integers(1, 12))
    def window(self, right, length):
        """A verification window whose first drafts are what will come."""

        def draft(sequence, room):
            tokens = seen(sequence, 0, sequence.num_tokens)
            drafts = []
            for position in range(min(length, room)):
                token = next_token(tokens)
                drafts.append(token if position < right else (token + 1) % 3)
                tokens.append(drafts[-1] + salt_of(sequence))
            return drafts

        self.engine.step(draft=draft)

    # ---- room ----------------------------------------------------------------------------------

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

    # ---- the external pool ---------------------------------------------------------------------

    @precondition(lambda self: self.engine.writeback is not None)
    @rule(count=st.integers(1, 9))
    def write_back(self, count):
        writeback = self.engine.writeback
        while writeback.has_pending and count:
            writeback.write_next()
            count -= 1

    @precondition(lambda self: self.engine.writeback is not None)
    @rule(drains=st.booleans())
    def restart(self, drains):
        """Memory is lost, files stay; nobody else's model may read them."""
        self.engine.cache.clear()
        if drains:
            self.engine.writeback.close()
        else:
            self.engine.writeback.pool.close(drain=False)
        if self.directory is not None:
            with pytest.raises(ConfigError, match="fingerprint"):
                self.open_pool("another")
            self.engine.counts["I12"] += 1
        self.engine.attach(self.open_pool())
        self.check_pool()

    @precondition(lambda self: self.engine.writeback is not None and self.directory is not None)
    @rule(choice=st.integers(0, 1000), how=st.sampled_from(["cut", "flip", "delete", "grow"]),
          reopens=st.booleans())  # fmt: skip
    def tear(self, choice, how, reopens):
        """Damage one file; what it belongs to is never given out again."""
        root = Path(self.directory.name)
        kinds = ("manifests", "states", "units")
        files = sorted(path for kind in kinds for path in (root / kind).iterdir())
        if not files:
            return
        victim = files[choice % len(files)]
        data = bytearray(victim.read_bytes())
        if how == "delete":
            victim.unlink()
        else:
            data[choice % len(data)] ^= 1 if how == "flip" else 0
            data = data[: len(data) // 2] if how == "cut" else data
            victim.write_bytes(data + b"x" if how == "grow" else data)
        if reopens or victim.parent.name == "manifests" or self.pool_options["host_bytes"]:
            # manifests are read at the start only, and what is in memory is not read at all
            self.engine.writeback.pool.close()
            self.engine.attach(self.open_pool())
        self.engine.counts["torn files"] += 1
        self.engine.counts["I12"] += 1
        self.check_pool()

    def check_pool(self):
        pool = self.engine.writeback.pool
        for key in self.engine.prefixes:
            checkpoint = pool.load(key)
            if checkpoint is not None:
                assert_external(checkpoint, self.engine.prefixes, self.engine.cache.unit_size)
                self.engine.counts["I12"] += 1
        pool.check()

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
            tokens = seen(sequence, 0, sequence.num_tokens)
            for index in range(len(sequence.prompt_ids), len(tokens)):
                id = sequence.output_ids[index - len(sequence.prompt_ids)]
                assert id == next_token(tokens[:index]), "the output differs from cold"
        if engine.writeback is not None:
            self.check_pool()
            engine.writeback.close()
        if self.directory is not None:
            self.directory.cleanup()
        engine.cache.clear()
        assert engine.cache.pages.num_free == engine.cache.pages.num_blocks
        assert engine.cache.states.num_free == engine.cache.states.num_blocks
        engine.counts["I10"] += 1
        engine.counts["preemptions"] += engine.scheduler.num_preemptions
        TOTALS.update(engine.counts)


SHORT = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = SHORT

LONG_EXAMPLES = 1500


@pytest.mark.long
def test_every_invariant_is_met_a_thousand_times():
    TOTALS.clear()
    phases: list[dict] = []
    with collector.with_value(phases.append):
        run_state_machine_as_test(
            PrefixMachine, settings=settings(SHORT, max_examples=LONG_EXAMPLES)
        )
    cases = [case for phase in phases for case in phase["generate-phase"]["test-cases"]]
    ends = Counter(case["status"] for case in cases)
    lines = [f"examples: {sum(ends.values())} run, by outcome {dict(ends)}"]
    names = sorted(TOTALS, key=lambda name: (name[0] != "I", len(name), name))
    lines += [f"{name:>16} {TOTALS[name]}" for name in names]
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert all(TOTALS[f"I{number}"] >= 1000 for number in range(1, 13))
