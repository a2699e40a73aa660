"""What holds of every sequence between two steps; called by `Scheduler.check`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from moonlet.engine.cache.manager import CacheManager
from moonlet.engine.request import RequestState, Sequence

__all__ = ["check_loading", "check_ownership", "check_running", "check_waiting"]


def check_ownership(manager: CacheManager, owners: SequenceOf[Sequence]) -> None:
    """Assert that the held blocks are those of ``owners``, each state once, each page as shared."""
    cache = manager.cache
    cache.check()
    owned = [block for s in owners for block in s.states]
    assert len(set(owned)) == len(owned), "a state has two owners"
    used = set(owned) | {page for s in owners for page in s.pages}
    assert used == cache.states.held() | cache.pages.held(), "blocks and owners differ"
    refs: dict[int, int] = {}
    for page in (page for s in owners for page in s.pages):
        refs[page] = refs.get(page, 0) + 1
    assert all(cache.pages.refs(page) == count for page, count in refs.items())


def check_waiting(sequence: Sequence) -> None:
    """Assert that a waiting sequence has nothing."""
    assert sequence.state is RequestState.WAITING
    assert not sequence.states
    assert not sequence.pages
    assert sequence.load is None
    assert sequence.num_computed == 0


def check_loading(sequence: Sequence) -> None:
    """Assert that a loading sequence has memory, and counts nothing before it has arrived."""
    assert sequence.state is RequestState.LOADING
    assert sequence.load is not None
    assert sequence.states
    assert sequence.num_computed == 0, "a prefix counts before it has arrived"
    assert sequence.num_registered == 0, "a prefix is findable before it has arrived"


def check_running(sequence: Sequence, num_pages: int) -> None:
    """Assert that a running sequence is where its tokens say; its rows take ``num_pages``."""
    is_known = sequence.num_computed < sequence.num_tokens
    assert sequence.num_computed <= sequence.num_tokens <= sequence.max_total_tokens
    assert sequence.load is None
    if sequence.state is RequestState.DECODE:
        assert sequence.num_tokens - sequence.num_computed <= 1
    else:
        assert sequence.state is RequestState.PREFILL
        assert is_known, "a prompt is computed, but the sequence does not decode"
    assert len(sequence.pages) >= num_pages, "rows without a page"
    assert sequence.states, "a running sequence without states"
