"""What goes in comes out: tiers, sharing, budgets, restarts, salts, threads, descriptors."""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonlet.core.errors import ConfigError, ShapeError
from moonlet.engine.cache.external import ExternalPool
from moonlet.engine.cache.external.disk import DiskTier
from tests.engine.external.chains import (
    IDENTITY,
    STATE_BYTES,
    UNIT_BYTES,
    Source,
    assert_intact,
    chain,
    store,
)
from tests.patience import PATIENCE_S

Open = Callable[..., ExternalPool]
TIERS = {
    "host": {"directory": None},
    "disk": {"host_bytes": 0},
    "both": {},
}


@pytest.mark.parametrize("tiers", TIERS)
def test_a_checkpoint_comes_back_as_it_went(open_pool: Open, tiers: str) -> None:
    pool, keys = open_pool(**TIERS[tiers]), chain("abc")
    assert pool.longest(keys) is None
    assert pool.load(keys[-1]) is None
    source = store(pool, keys)
    assert source.units_read == [0, 1, 2]
    assert source.num_states_read == 1
    assert pool.flush(PATIENCE_S)
    pool.check()
    # only the checkpoint can be found, not the positions before it
    assert pool.longest(keys) == 2
    assert pool.longest(keys[:2]) is None
    assert pool.longest(chain("abcd")) == 2
    assert_intact(pool.load(keys[-1]), keys)
    stats = pool.stats()
    assert (stats.num_stores, stats.num_misses) == (1, 1)
    assert stats.num_host_hits == (tiers != "disk")
    assert stats.num_disk_hits == (tiers == "disk")
    assert stats.host_bytes == (0 if tiers == "disk" else 3 * UNIT_BYTES + STATE_BYTES)
    assert stats.read_bytes == (3 * UNIT_BYTES + STATE_BYTES if tiers == "disk" else 0)
    assert stats.written_bytes == stats.disk_bytes
    assert stats.is_writing == (tiers != "host")


@pytest.mark.parametrize("tiers", TIERS)
def test_units_of_a_chain_are_kept_once(open_pool: Open, tiers: str) -> None:
    pool = open_pool(**TIERS[tiers])
    store(pool, chain("ab"))
    assert pool.flush(PATIENCE_S)
    before = pool.stats()
    assert store(pool, chain("abcd")).units_read == [2, 3]
    assert store(pool, chain("abx")).units_read == [2]
    assert pool.flush(PATIENCE_S)
    pool.check()
    for text in ("ab", "abcd", "abx"):
        assert_intact(pool.load(chain(text)[-1]), chain(text))
    added = pool.stats().host_bytes - before.host_bytes
    assert added == (0 if tiers == "disk" else 3 * UNIT_BYTES + 2 * STATE_BYTES)
    if tiers != "host":
        written = pool.stats().written_bytes - before.written_bytes
        manifests = sum(
            (pool._disk._folder.path / "manifests" / chain(text)[-1].hex()).stat().st_size
            for text in ("abcd", "abx")
        )
        assert written == 3 * UNIT_BYTES + 2 * STATE_BYTES + manifests


def test_what_is_there_is_not_copied_again(open_pool: Open) -> None:
    pool = open_pool()
    store(pool, chain("ab"))
    assert pool.flush(PATIENCE_S)
    source = Source(chain("ab"))
    assert not pool.store(source.keys, source.read_rows, source.read_state)
    assert source.units_read == []
    assert source.num_states_read == 0
    assert pool.stats().num_stores == 1


def test_the_longest_checkpoint_wins(open_pool: Open) -> None:
    pool = open_pool()
    for text in ("a", "abc", "abcde"):
        store(pool, chain(text))
    assert [pool.longest(chain(text)) for text in ("abcdef", "abcde", "abcd", "ab", "b", "")] == [
        4,
        4,
        2,
        0,
        None,
        None,
    ]


def test_another_salt_finds_nothing(open_pool: Open) -> None:
    pool = open_pool()
    mine, theirs = chain("canary", salt="tenant-1"), chain("canary", salt="tenant-2")
    store(pool, mine)
    assert pool.longest(theirs) is None
    assert all(pool.load(key) is None for key in theirs)
    source = store(pool, theirs)
    assert source.units_read == list(range(6)), "units were shared across salts"
    assert pool.flush(PATIENCE_S)
    assert_intact(pool.load(mine[-1]), mine)
    assert_intact(pool.load(theirs[-1]), theirs)


def test_memory_evicts_the_least_recently_used(open_pool: Open) -> None:
    pool = open_pool(directory=None, host_bytes=3 * (2 * UNIT_BYTES + STATE_BYTES))
    for text in ("aa", "bb", "cc"):
        store(pool, chain(text))
    assert_intact(pool.load(chain("aa")[-1]), chain("aa"))
    store(pool, chain("bb"))
    store(pool, chain("dd"))
    pool.check()
    found = {text: pool.longest(chain(text)) for text in ("aa", "bb", "cc", "dd")}
    assert found == {"aa": 1, "bb": 1, "cc": None, "dd": 1}
    assert pool.stats().num_host_evictions == 1


def test_an_evicted_checkpoint_leaves_shared_units(open_pool: Open) -> None:
    pool = open_pool(directory=None, host_bytes=4 * UNIT_BYTES + 2 * STATE_BYTES)
    for text in ("ab", "abc", "abcd"):
        store(pool, chain(text))
    pool.check()
    assert pool.longest(chain("ab")) is None
    assert_intact(pool.load(chain("abc")[-1]), chain("abc"))
    assert_intact(pool.load(chain("abcd")[-1]), chain("abcd"))


def test_disk_answers_what_memory_forgot(open_pool: Open) -> None:
    pool = open_pool(host_bytes=2 * UNIT_BYTES + STATE_BYTES)
    for text in ("aa", "bb"):
        store(pool, chain(text))
        assert pool.flush(PATIENCE_S)
    assert_intact(pool.load(chain("aa")[-1]), chain("aa"))
    assert pool.stats().num_disk_hits == 1
    # it is in memory now, in place of the other
    assert_intact(pool.load(chain("aa")[-1]), chain("aa"))
    assert pool.stats().num_host_hits == 1
    pool.check()


def test_a_checkpoint_beyond_every_budget_evicts_nobody(open_pool: Open) -> None:
    pool = open_pool(host_bytes=2 * UNIT_BYTES + STATE_BYTES, disk_bytes=2000)
    store(pool, chain("ab"))
    assert pool.flush(PATIENCE_S)
    assert pool.stats().num_disk_checkpoints == 1
    source = store(pool, chain("x" * 100))
    assert source.units_read == []
    assert pool.longest(chain("x" * 100)) is None
    assert_intact(pool.load(chain("ab")[-1]), chain("ab"))


def test_a_manifest_that_breaks_the_budget_is_not_written(open_pool: Open) -> None:
    # rows and state fit exactly, their manifest does not
    pool = open_pool(host_bytes=0, disk_bytes=UNIT_BYTES + STATE_BYTES)
    store(pool, chain("a"))
    assert pool.flush(PATIENCE_S)
    pool.check()
    stats = pool.stats()
    assert (stats.num_lost_writes, stats.num_disk_checkpoints, stats.disk_bytes) == (1, 0, 0)
    assert stats.is_writing


def test_a_restart_keeps_checkpoints_and_their_order(open_pool: Open) -> None:
    pool = open_pool(host_bytes=0)
    for text in ("aa", "bb", "cc"):
        store(pool, chain(text))
        assert pool.flush(PATIENCE_S)
    assert_intact(pool.load(chain("aa")[-1]), chain("aa"))
    used = pool.stats().disk_bytes
    pool.close()

    again = open_pool(host_bytes=0, disk_bytes=used)
    again.check()
    assert again.stats().disk_bytes == used
    store(again, chain("dd"))
    assert again.flush(PATIENCE_S)
    found = {text: again.longest(chain(text)) for text in ("aa", "bb", "cc", "dd")}
    assert found == {"aa": 1, "bb": None, "cc": 1, "dd": 1}
    assert_intact(again.load(chain("aa")[-1]), chain("aa"))


def test_a_hit_in_memory_counts_as_a_use_of_the_file(open_pool: Open) -> None:
    pool = open_pool()
    for text in ("aa", "bb"):
        store(pool, chain(text))
        assert pool.flush(PATIENCE_S)
    pool.load(chain("aa")[-1])
    used = pool.stats().disk_bytes
    pool.close()
    again = open_pool(disk_bytes=used)
    store(again, chain("cc"))
    assert again.flush(PATIENCE_S)
    again_found = [again._disk.touch(chain(text)[-1]) for text in ("aa", "bb", "cc")]
    assert again_found == [True, False, True]


def test_a_smaller_budget_keeps_the_newest_that_fit(open_pool: Open) -> None:
    pool = open_pool(host_bytes=0)
    # the long one needs the units of the short one, which is older and goes
    for text in ("ab", "zz", "abcd"):
        store(pool, chain(text))
        assert pool.flush(PATIENCE_S)
    folder = pool._disk._folder.path
    manifest = (folder / "manifests" / chain("abcd")[-1].hex()).stat().st_size
    pool.close()
    again = open_pool(host_bytes=0, disk_bytes=4 * UNIT_BYTES + STATE_BYTES + manifest)
    again.check()
    assert [again.longest(chain(text)) for text in ("ab", "zz", "abcd")] == [None, None, 3]
    assert_intact(again.load(chain("abcd")[-1]), chain("abcd"))
    assert again.stats().num_disk_evictions == 2
    again.close()
    nothing = open_pool(host_bytes=0, disk_bytes=10)
    assert nothing.longest(chain("abcd")) is None
    assert nothing.stats().disk_bytes == 0


def test_a_slow_disk_drops_the_oldest_that_waits(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate, original = threading.Event(), threading.Event(), DiskTier.store

    def slow_store(self: DiskTier, checkpoint: object) -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)
        original(self, checkpoint)

    monkeypatch.setattr(DiskTier, "store", slow_store)
    pool = open_pool(max_pending_bytes=2 * (UNIT_BYTES + STATE_BYTES))
    store(pool, chain("a"))
    assert entered.wait(PATIENCE_S)
    for text in ("b", "c", "d", "e"):
        store(pool, chain(text))
        assert pool._queue.num_waiting_bytes <= 2 * (UNIT_BYTES + STATE_BYTES)
    assert pool.stats().num_pending_writes == 3
    assert pool.stats().num_dropped_writes == 2
    assert not pool.flush(0.01)
    # one that is larger than the bound waits alone
    store(pool, chain("xyz"))
    assert pool.stats().num_pending_writes == 2
    gate.set()
    assert pool.flush(PATIENCE_S)
    on_disk = [text for text in ("a", "b", "c", "d", "e", "xyz") if chain(text)[-1] in pool._disk]
    assert on_disk == ["a", "xyz"]
    # what was dropped is written when it is stored again
    store(pool, chain("b"))
    assert pool.flush(PATIENCE_S)
    assert chain("b")[-1] in pool._disk


@pytest.mark.parametrize("drain", [True, False])
def test_closing_writes_or_drops_what_waits(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch, drain: bool
) -> None:
    entered, gate, original = threading.Event(), threading.Event(), DiskTier.store

    def slow_store(self: DiskTier, checkpoint: object) -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)
        original(self, checkpoint)

    monkeypatch.setattr(DiskTier, "store", slow_store)
    pool = open_pool()
    store(pool, chain("a"))
    assert entered.wait(PATIENCE_S)
    store(pool, chain("b"))
    threading.Timer(0.05, gate.set).start()
    pool.close(drain=drain)
    pool.close()
    again = open_pool()
    assert again.longest(chain("a")) == 0
    assert again.longest(chain("b")) == (0 if drain else None)


def test_a_wrong_size_is_refused(open_pool: Open) -> None:
    pool, source = open_pool(), Source(chain("ab"))
    with pytest.raises(ShapeError, match="unit of 1 bytes"):
        pool.store(source.keys, lambda start, stop: np.zeros(1, np.uint8), source.read_state)
    with pytest.raises(ShapeError, match=f"state of 5 bytes was given; it has {STATE_BYTES}"):
        pool.store(source.keys, source.read_rows, lambda: np.zeros(5, np.uint8))
    with pytest.raises(ShapeError, match="0 chain hashes"):
        pool.store([], source.read_rows, source.read_state)
    with pytest.raises(ShapeError, match="32 bytes each"):
        pool.store([b"short"], source.read_rows, source.read_state)
    assert pool.stats().num_stores == 0


def test_a_pool_without_tiers_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_bytes above 0 or a directory"):
        ExternalPool(IDENTITY, host_bytes=0)


def test_many_threads_store_and_load(open_pool: Open) -> None:
    one = 2 * UNIT_BYTES + STATE_BYTES
    pool = open_pool(host_bytes=2 * one, disk_bytes=20 * one)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        try:
            for _ in range(60):
                keys = chain("".join(generator.choices("ab", k=generator.randint(1, 4))))
                if generator.random() < 0.5:
                    store(pool, keys)
                else:
                    checkpoint = pool.load(keys[-1])
                    if checkpoint is not None:
                        assert_intact(checkpoint, keys)
                pool.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.flush(PATIENCE_S)
    pool.check()
    for key in list(pool._disk._ledger):
        assert_intact(pool.load(key), pool._disk._manifests[key].keys)
    stats = pool.stats()
    assert stats.num_disk_evictions > 0
    assert stats.num_disk_hits > 0
    assert stats.num_corrupt == 0


def test_descriptors_do_not_leak(open_pool: Open, tmp_path: Path) -> None:
    def cycle() -> None:
        pool = open_pool(host_bytes=0)
        for text in ("a", "ab", "abc"):
            store(pool, chain(text))
        assert pool.flush(PATIENCE_S)
        state = tmp_path / "pool" / "states" / chain("ab")[-1].hex()
        state.write_bytes(b"torn")
        assert pool.load(chain("ab")[-1]) is None
        assert_intact(pool.load(chain("abc")[-1]), chain("abc"))
        with pytest.raises(ConfigError, match="in use"):
            open_pool(host_bytes=0)
        pool.close()
        with pytest.raises(ConfigError, match="fingerprint"):
            open_pool(
                identity=type(IDENTITY)(
                    fingerprint="other", hash_unit=4, geometry=IDENTITY.geometry
                )
            )

    cycle()
    num_open, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert threading.active_count() == num_threads
