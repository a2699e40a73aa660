"""An event loop whose clock jumps to the next timer: runs of hours take no time, to the bit."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that never waits."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds that its timers have waited, and those that tests add to `now`."""
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        """Let the time pass at once."""
        assert timeout is not None, "nothing would ever happen"
        # as asyncio does, so that a timer is due when its time is reached but for rounding
        self._loop.now += timeout
        return super().select(0)


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a clock that starts at 0."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
