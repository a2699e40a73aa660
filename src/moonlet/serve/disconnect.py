"""A client that went away must not keep the engine busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive

from moonlet.engine.handle import RequestHandle

__all__ = ["aborting_on_disconnect", "briefly_until_admitted"]

# a request that is queued for longer gets its headers without the count of cached tokens
_ADMISSION_S = 0.05


async def briefly_until_admitted(handles: Iterable[RequestHandle]) -> None:
    """Give requests a moment to be admitted, so that headers can say what was cached."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_ADMISSION_S):
            for handle in handles:
                await handle.admitted()


@asynccontextmanager
async def aborting_on_disconnect(
    receive: Receive, abort: Callable[[], None]
) -> AsyncGenerator[None]:
    """Call `abort` when the client disconnects inside the block, or the block fails.

    Args:
        receive: The connection's receive channel, with the request body already read.
        abort: Ends the request's generation; may be called after the request is over.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        abort()
        raise
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
