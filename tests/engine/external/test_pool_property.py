"""Random stores, loads, evictions, damage and restarts against a dict of what was stored."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moonlet.engine.cache.external import ExternalPool
from tests.engine.external.chains import (
    IDENTITY,
    STATE_BYTES,
    UNIT_BYTES,
    assert_intact,
    chain,
    store,
)
from tests.patience import PATIENCE_S

TEXTS = st.text(alphabet="ab", min_size=1, max_size=4)
ONE = 2 * UNIT_BYTES + STATE_BYTES
SEEN: Counter[str] = Counter()


class PoolMachine(RuleBasedStateMachine):
    """A pool whose budgets hold a few checkpoints, over a directory that survives restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.pool: ExternalPool | None = None
        self.stored: dict[bytes, tuple[bytes, ...]] = {}

    @initialize(host=st.integers(0, 4), disk=st.integers(0, 8))
    def start(self, host: int, disk: int) -> None:
        self._open(host, disk)

    def _open(self, host: int, disk: int) -> None:
        self.pool = ExternalPool(
            IDENTITY,
            host_bytes=host * ONE,
            directory=self.directory / "pool",
            disk_bytes=disk * (ONE + 700),
        )

    @rule(text=TEXTS, salt=st.sampled_from(["", "s"]))
    def store(self, text: str, salt: str) -> None:
        keys = chain(text, salt)
        store(self.pool, keys)
        self.stored[keys[-1]] = keys

    @rule(text=TEXTS, salt=st.sampled_from(["", "s"]))
    def load(self, text: str, salt: str) -> None:
        keys = chain(text, salt)
        index = self.pool.longest(keys)
        if index is None:
            SEEN["miss"] += 1
            return
        assert keys[index] in self.stored, "a checkpoint was found that nobody stored"
        checkpoint = self.pool.load(keys[index])
        if checkpoint is not None:
            SEEN["hit"] += 1
            assert_intact(checkpoint, keys[: index + 1])
        else:
            SEEN["broken"] += 1
            assert self.pool.longest(keys) != index

    @precondition(lambda self: self.stored)
    @rule(choice=st.integers(0, 1 << 16), tail=TEXTS)
    def load_known(self, choice: int, tail: str) -> None:
        keys = sorted(self.stored.values())[choice % len(self.stored)]
        index = self.pool.longest([*keys, *chain(tail, "elsewhere")])
        checkpoint = None if index is None else self.pool.load(keys[index])
        # None where `damage` hit the file of one that was in memory then
        if checkpoint is not None:
            SEEN["known"] += 1
            assert_intact(checkpoint, keys[: index + 1])

    @rule()
    def flush(self) -> None:
        assert self.pool.flush(PATIENCE_S)

    @rule(host=st.integers(0, 4), disk=st.integers(0, 8), drain=st.booleans())
    def restart(self, host: int, disk: int, drain: bool) -> None:
        self.pool.close(drain=drain)
        self._open(host, disk)
        SEEN["survived"] += self.pool.stats().num_disk_checkpoints

    @precondition(lambda self: self.pool is not None)
    @rule(choice=st.integers(0, 1 << 16), cut=st.booleans())
    def damage(self, choice: int, cut: bool) -> None:
        assert self.pool.flush(PATIENCE_S)
        kinds = ("units", "states")
        files = sorted(p for kind in kinds for p in (self.directory / "pool" / kind).iterdir())
        # what is on disk is the background thread's matter, so no precondition may ask
        if not files:
            return
        victim = files[choice % len(files)]
        data = bytearray(victim.read_bytes())
        if cut:
            del data[choice % len(data) :]
        else:
            data[choice % len(data)] ^= 1 + choice % 255
        victim.write_bytes(data)
        # the length on disk no longer fits the books, so a load or a restart must notice
        for key in self.stored:
            checkpoint = self.pool.load(key)
            if checkpoint is not None:
                assert_intact(checkpoint, self.stored[key])
        SEEN["damaged"] += 1
        self.pool.close()
        self._open(2, 8)

    @invariant()
    def the_pool_is_consistent(self) -> None:
        if self.pool is not None:
            self.pool.check()
            stats = self.pool.stats()
            assert stats.host_bytes <= stats.host_budget_bytes
            assert stats.disk_bytes <= stats.disk_budget_bytes

    def teardown(self) -> None:
        if self.pool is not None:
            assert self.pool.flush(PATIENCE_S)
            self.pool.check()
            self.pool.close()
        shutil.rmtree(self.directory)


def test_random_orders_against_a_dict() -> None:
    SEEN.clear()
    run = settings(max_examples=40, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(PoolMachine, settings=run)
    # the machine must have been where it matters
    for what in ("miss", "known", "survived", "damaged"):
        assert SEEN[what], SEEN
