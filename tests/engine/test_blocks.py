"""Blocks: nothing lost, nothing twice, no use after release, and what is cached stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonlet.core.errors import CapacityError, ConfigError
from moonlet.engine.cache.blocks import NULL_BLOCK, BlockPool


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60))
def test_blocks_against_a_model(num_blocks, choices):
    pool = BlockPool(num_blocks, "pages")
    refs: dict[int, int] = {}
    cached: set[int] = set()
    for action, count in choices:
        held = sorted(block for block, n in refs.items() if n)
        if action == 0:
            if count <= pool.num_free:
                for block in pool.allocate(count):
                    assert block != NULL_BLOCK
                    assert not refs.get(block)
                    assert block not in cached
                    refs[block] = 1
            else:
                before = pool.num_free
                with pytest.raises(CapacityError, match="pages wanted"):
                    pool.allocate(count)
                assert pool.num_free == before
        elif action == 1 and held:
            block = held[count % len(held)]
            pool.release([block])
            refs[block] -= 1
        elif action == 2 and held:
            block = held[count % len(held)]
            pool.keep(block)
            cached.add(block)
        elif action == 3 and cached:
            block = sorted(cached)[count % len(cached)]
            pool.retain([block])
            refs[block] += 1
        elif action == 4 and cached:
            block = sorted(cached)[count % len(cached)]
            pool.forget(block)
            cached.discard(block)
        pool.check()
        held = {block for block, n in refs.items() if n}
        assert pool.held() == held
        assert pool.cached() == cached
        assert pool.num_idle == len(cached - held)
        assert pool.num_free == num_blocks - len(held | cached)
        assert pool.num_held == len(held)


def test_release_of_a_free_block_is_our_bug():
    pool = BlockPool(2, "pages")
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="not held"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="is free"):
        pool.retain(blocks)


def test_reused_block_has_a_new_epoch():
    pool = BlockPool(1, "pages")
    (block,) = pool.allocate(1)
    first = pool.epoch(block)
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.epoch(block) == first + 1


def test_a_lost_block_is_noticed():
    pool = BlockPool(3, "pages")
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


def test_an_empty_pool_is_refused():
    with pytest.raises(ConfigError, match="number of pages is 0"):
        BlockPool(0, "pages")
