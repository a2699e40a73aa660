"""Levels and threads that tests of native operators run through."""

from collections.abc import Callable, Iterator

import pytest
import torch

from moonlet.kernels import _native, _native_ops


@pytest.fixture(params=_native.isa_levels() or ["none"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction-set level that runs here."""
    index = _native.isa_levels().index(request.param) if request.param != "none" else 0
    monkeypatch.setattr(_native_ops, "level", lambda: index)
    return request.param


@pytest.fixture
def thread_counts() -> Iterator[list[int]]:
    """Thread counts to try; torch's own number comes back afterwards."""
    before = torch.get_num_threads()
    yield [1, 2, 3, 4]
    torch.set_num_threads(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, which comes back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
