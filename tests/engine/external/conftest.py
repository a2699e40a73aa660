"""Pools of this folder are consistent and closed when their test ends."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonlet.engine.cache.external import ExternalPool
from tests.engine.external.chains import IDENTITY
from tests.patience import PATIENCE_S


@pytest.fixture
def open_pool(tmp_path: Path) -> Iterator[Callable[..., ExternalPool]]:
    """Open pools over one directory unless told otherwise."""
    pools: list[ExternalPool] = []

    def make(**changes: object) -> ExternalPool:
        defaults = {
            "identity": IDENTITY,
            "host_bytes": 1 << 20,
            "directory": tmp_path / "pool",
            "disk_bytes": 1 << 20,
        }
        pools.append(ExternalPool(**{**defaults, **changes}))
        return pools[-1]

    yield make
    for pool in pools:
        assert pool.flush(PATIENCE_S)
        pool.check()
        pool.close()
