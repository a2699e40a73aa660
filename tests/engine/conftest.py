"""Engines of this folder are closed, and must be consistent, when their test ends."""

from collections.abc import Callable, Iterator

import pytest

from moonlet.engine import Engine


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Build engines that check themselves after every step."""
    engines: list[Engine] = []

    def make(model: object, **limits: object) -> Engine:
        defaults = {
            "max_num_seqs": 4,
            "max_model_len": 64,
            "page_size": 4,
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
