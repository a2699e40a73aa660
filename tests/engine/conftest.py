"""Engines of this folder are closed, and must be consistent, when their test ends."""

from collections.abc import Callable, Iterator

import pytest

from moonlet.engine import Engine
from moonlet.engine.memory import MemoryOptions


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Build engines that check themselves after every step."""
    engines: list[Engine] = []

    def make(
        model: object, num_pages: int | None = None, page_size: int = 4, **limits: object
    ) -> Engine:
        # a scripted model keeps its history beside the state, so it cannot resume a prefix
        memory = MemoryOptions(
            page_size=page_size, unit_size=page_size, num_pages=num_pages, prefix_caching=False
        )
        defaults = {
            "max_num_seqs": 4,
            "max_model_len": 64,
            "memory": memory,
            "stop_ids": [258],
            "check_each_step": True,
        }
        engines.append(Engine(model, **{**defaults, **limits}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine.check()
        stats = engine.stats()
        assert stats.num_free_slots == stats.num_slots
        assert stats.num_free_pages == stats.num_pages
        assert stats.num_running == stats.num_waiting == 0
