"""Several asynchronous streams as one, in the order in which their items arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

__all__ = ["merged"]

ItemT = TypeVar("ItemT")


async def merged(streams: Sequence[AsyncIterator[ItemT]]) -> AsyncIterator[ItemT]:
    """Yield the items of all streams as they come; the first failure ends the whole."""
    queue: asyncio.Queue[tuple[ItemT] | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncIterator[ItemT]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((item,))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            entry = await queue.get()
            if isinstance(entry, BaseException):
                raise entry
            if entry is None:
                num_open -= 1
            else:
                yield entry[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
