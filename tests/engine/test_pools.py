"""Slots and pages: nothing lost, nothing twice, no use after release."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonlet.core.errors import CapacityError, ConfigError
from moonlet.engine.cache.pages import PagePool
from moonlet.engine.cache.slots import SlotPool


@given(st.integers(1, 6), st.lists(st.integers(0, 8), max_size=60))
def test_slots_against_a_set(num_slots: int, choices: list[int]) -> None:
    pool, owned = SlotPool(num_slots), []
    for choice in choices:
        if choice % 2 and owned:
            pool.release(owned.pop(choice % len(owned)))
        elif pool.num_free:
            owned.append(pool.allocate())
        else:
            with pytest.raises(CapacityError):
                pool.allocate()
        pool.check()
        assert pool.used() == set(owned)
        assert pool.num_free == num_slots - len(owned)
        assert 0 not in owned


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_pages_against_a_set(num_pages: int, choices: list[tuple[bool, int]]) -> None:
    pool, owned = PagePool(num_pages, page_size=4), []
    for is_release, count in choices:
        if is_release and owned:
            pool.release(owned.pop(count % len(owned)))
        elif count <= pool.num_free:
            pages = pool.allocate(count)
            assert len(set(pages)) == count
            assert all(pool.epoch(page) >= 1 for page in pages)
            owned.append(pages)
        else:
            before = pool.num_free
            with pytest.raises(CapacityError):
                pool.allocate(count)
            assert pool.num_free == before
        pool.check()
        assert pool.used() == {page for pages in owned for page in pages}
        assert 0 not in pool.used()


def test_release_twice_is_our_bug() -> None:
    slots, pages = SlotPool(2), PagePool(2, 4)
    slot, page = slots.allocate(), pages.allocate(1)
    slots.release(slot)
    pages.release(page)
    with pytest.raises(AssertionError):
        slots.release(slot)
    with pytest.raises(AssertionError):
        pages.release(page)


def test_reused_page_has_a_new_epoch() -> None:
    pool = PagePool(1, 4)
    (page,) = pool.allocate(1)
    first = pool.epoch(page)
    pool.release([page])
    assert pool.allocate(1) == [page]
    assert pool.epoch(page) == first + 1


@pytest.mark.parametrize(("rows", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for(rows: int, pages: int) -> None:
    assert PagePool(3, 4).pages_for(rows) == pages


def test_a_lost_slot_or_page_is_noticed() -> None:
    slots, pages = SlotPool(3), PagePool(3, 4)
    slots._free.pop()
    pages._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        slots.check()
    with pytest.raises(AssertionError, match="lost"):
        pages.check()


def test_empty_pools_are_refused() -> None:
    with pytest.raises(ConfigError):
        SlotPool(0)
    with pytest.raises(ConfigError):
        PagePool(1, 0)
