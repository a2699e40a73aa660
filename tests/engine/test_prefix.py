"""The worked cases of hybrid-cache.md section 17 and rules of the index, on the symbolic engine."""

import pytest

from moonlet.core.errors import CapacityError, ConfigError
from moonlet.engine.cache.blocks import BlockPool
from moonlet.engine.cache.checkpoints import Checkpoint, is_kept, score
from moonlet.engine.cache.prefix import PrefixCache
from tests.engine.symbolic import STOP, SymbolicEngine

# P = 12, h = 4, budget 16 unless a test says otherwise


def tokens(length, start=0):
    return [(start + i) % 3 for i in range(length)]


def parted(prompt, at, length):
    """A prompt of ``length`` that shares exactly ``at`` tokens with the other one."""
    other = (prompt[at] + 1) % 3 if at < len(prompt) else 1
    return [*prompt[:at], other, *([2] * (length - at - 1))]


def warm(prompt, **options):
    engine = SymbolicEngine(**options)
    return engine, engine.ends_of(prompt)


def test_case_1_a_hit_inside_a_page():
    prompt = tokens(22)
    engine, ends = warm(prompt, page_size=48, budget=50)
    assert ends == [20, 22]
    second = engine.submit(parted(prompt, 22, 60))
    engine.run()
    assert second.num_cached_tokens == 20
    assert engine.counts["tail copies"] == 1


@pytest.mark.parametrize(
    ("length", "ends", "hit"),
    [(25, [12, 24, 25], 24), (24, [12, 20, 24], 20), (4, [4], 0), (5, [4, 5], 4)],
)
def test_case_2_the_same_prompt_again(length, ends, hit):
    engine, first = warm(tokens(length))
    assert first == ends
    again = engine.submit(tokens(length))
    engine.run()
    assert again.num_cached_tokens == hit


@pytest.mark.parametrize("multiple", [1, 2, 3, 6])
def test_a_prompt_of_whole_units_or_pages_hits(multiple):
    for unit in (4, 12):
        length = multiple * unit
        engine, _ = warm(tokens(length))
        again = engine.submit(tokens(length))
        engine.run()
        assert again.num_cached_tokens == (length - 1) // 4 * 4


def test_case_3_the_second_to_branch_off_marks_the_place():
    prompt = tokens(50)
    engine, ends = warm(prompt)
    assert ends == [12, 24, 36, 48, 50]
    assert {12, 24, 36, 48} <= set(engine.positions())
    second = engine.submit(parted(prompt, 30, 40))
    stops = [end for step in engine.run() for end in step if end <= 40]
    assert second.num_cached_tokens == 24
    assert stops == [28, 36, 40]
    third = engine.submit([*prompt[:30], *([STOP] * 10)])
    engine.run()
    assert third.num_cached_tokens == 28


def test_case_4_a_checkpoint_is_whole_or_gone():
    engine, _ = warm(tokens(25), groups=3)
    record = next(c for c in engine.cache._checkpoints.values() if c.position == 24)
    for kind in tuple(record.kinds):
        engine.cache.retire(record, kind)
    engine.audit()
    assert all(engine.cache.states.refs(b) == 0 for b in record.states)
    assert not set(record.states) & engine.cache.states.cached()
    again = engine.submit(tokens(25))
    engine.run()
    assert again.num_cached_tokens == 12


def test_case_5_rows_go_only_after_the_checkpoints_that_need_them():
    engine, _ = warm(tokens(50), num_pages=10)
    cache = engine.cache
    taken = cache.allocate_pages(cache.num_available(cache.pages) - 1)
    engine.memory.poison_free()
    cache.check()
    assert all(position <= 12 for position in engine.positions())
    cache.release_pages(taken)
    left = max(engine.positions(), default=0)
    again = engine.submit(tokens(50))
    engine.run()
    assert again.num_cached_tokens == left


def test_case_6_a_hit_is_pinned_before_anything_is_allocated():
    prompt = tokens(25)
    engine, _ = warm(prompt, num_states=6, seqs=4)
    cache = engine.cache
    found = cache.lookup(engine.finished[0].chain.keys, 24)
    cache.pin(found)
    with pytest.raises(CapacityError):
        cache.allocate_states(6)
    states = cache.allocate_states(5)
    assert not set(states) & set(found.checkpoint.states)
    assert cache.find(found.checkpoint.key) is found.checkpoint
    cache.states.release(states)
    cache.unpin(found)
    engine.audit()


def test_case_7_the_same_prompt_at_the_same_time_is_computed_once():
    engine = SymbolicEngine()
    first, second = engine.submit(tokens(25)), engine.submit(tokens(25))
    steps = engine.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 24)
    assert sum(len(ends) for ends in steps) == 4


def test_two_that_part_later_wait_and_split_exactly():
    prompt = tokens(60)
    engine = SymbolicEngine()
    engine.submit(prompt)
    second = engine.submit(parted(prompt, 41, 60))
    third = engine.submit([*tokens(7), STOP, *tokens(20)])
    engine.run()
    assert second.num_cached_tokens == 40
    assert third.num_cached_tokens == 4


def test_case_9_states_are_kept_while_decoding():
    engine = SymbolicEngine()
    engine.submit(tokens(22), max_tokens=10)
    engine.run()
    # 31 tokens were computed; the last endpoint became the end of a turn
    assert {12, 20, 24, 28} <= set(engine.positions())
    old = engine.finished[0]
    prompt = [*old.token_range(0, 31), *([2] * 6)]
    again = engine.submit(prompt)
    engine.run()
    assert again.num_cached_tokens == 28


def test_rolling_checkpoints_of_a_decode_replace_each_other():
    engine = SymbolicEngine(page_size=48, num_pages=10)
    engine.submit(tokens(5), max_tokens=30)
    engine.run()
    # the tail of the prompt, and the last endpoint
    assert engine.positions() == [4, 32]


def test_case_11_a_preempted_request_resumes_at_its_last_checkpoint():
    engine = SymbolicEngine(budget=8)
    sequence = engine.submit(tokens(50))
    for _ in range(7):
        engine.step()
    assert sequence.num_computed == 44
    engine.scheduler._preempt(sequence)
    engine.audit()
    assert engine.positions() == [12, 24, 36, 44]
    ends = [end for step in engine.run() for end in step]
    assert sequence.num_cached_tokens == 44
    assert ends == [48, 50]


def test_case_12_salts_share_nothing():
    engine = SymbolicEngine()
    canary = [2, 0, 1] * 9
    engine.submit(canary, salt="a")
    engine.run()
    other, same = engine.submit(canary, salt="b"), engine.submit(canary, salt="a")
    engine.run()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 24)


def test_message_ends_are_kept_and_survive_longer():
    engine = SymbolicEngine(page_size=48, num_pages=20)
    prompt = [*tokens(8), STOP, *tokens(9), STOP, *tokens(12)]
    engine.submit(prompt)
    engine.run()
    # ends of messages at 9 and 19, and the last endpoint below the end
    assert engine.positions() == [8, 16, 28]
    # a client that drops what came after the last message end still resumes there
    again = engine.submit([*prompt[:19], *([2] * 9)])
    engine.run()
    assert again.num_cached_tokens == 16


def test_switched_off_nothing_is_found_or_kept():
    engine = SymbolicEngine(is_sharing=False)
    engine.submit(tokens(25))
    engine.run()
    again = engine.submit(tokens(25))
    engine.run()
    assert again.num_cached_tokens == 0
    assert not engine.cache.pages.cached()
    assert not engine.positions()


def test_a_long_path_keeps_a_handful_of_checkpoints_per_doubling():
    pages, end = 1, 4096
    kept = [p for p in range(1, end) if all(is_kept(p, e, 1) for e in (p + 1, (p + end) // 2, end))]
    for doubling in range(3, 12):
        inside = [p for p in kept if 2**doubling <= (end - p) * pages < 2 ** (doubling + 1)]
        assert 2 <= len(inside) <= 4, doubling
    assert len(kept) < 45


def test_kept_is_never_kept_again_after_it_was_not():
    for position in range(1, 200):
        kept = [is_kept(position, end, 1) for end in range(position + 1, 600)]
        assert kept == sorted(kept, reverse=True)


def test_a_path_is_thinned_as_it_grows():
    engine = SymbolicEngine(
        page_size=4, num_pages=140, num_states=200, max_len=520, budget=16, seqs=1
    )
    engine.submit(tokens(500))
    engine.run()
    assert len(engine.positions()) < 30
    assert {496} <= set(engine.positions())


def test_what_is_used_and_what_ends_a_turn_goes_last():
    rolling = Checkpoint(4, (b"a",), (1,), {"rolling"}, last_used=10)
    turn = Checkpoint(4, (b"b",), (2,), {"turn", "page"}, last_used=1)
    used = Checkpoint(4, (b"c",), (3,), {"page"}, last_used=1, hits=9)
    page = Checkpoint(4, (b"d",), (4,), {"page"}, last_used=1)
    assert sorted([rolling, turn, used, page], key=score) == [page, rolling, turn, used]


def test_geometry_is_checked():
    pool = BlockPool(3, "pages")
    with pytest.raises(ConfigError, match="multiple of unit_size"):
        PrefixCache(pool, pool, page_size=10, unit_size=4)
