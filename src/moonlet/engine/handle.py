"""The caller's end of a request: a stream of token outputs, for threads and for asyncio.

The engine thread puts, one consumer takes. Outputs that pile up while the consumer is busy are
merged into one, so a slow reader costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Generator

from moonlet.engine.request import TokenLogprobs, TokenOutput

__all__ = ["RequestHandle", "merge_outputs"]


def merge_outputs(outputs: list[TokenOutput]) -> TokenOutput:
    """Join consecutive outputs of one request; at least one."""
    if len(outputs) == 1:
        return outputs[0]
    ids = tuple(id for output in outputs for id in output.ids)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    last = outputs[-1]
    return TokenOutput(ids=ids, logprobs=logprobs, finish=last.finish, error=last.error)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class RequestHandle:
    """Stream of `TokenOutput` of one submitted request, for one consumer.

    Iterate it (``for output in handle``) from a thread or ``async for output in handle.aiter()``
    from a coroutine. The last output has ``finish`` set. Leaving the loop early aborts the request.

    Attributes:
        request_id: The id that the request carries.
        num_cached_tokens: Prompt tokens that were not computed again; None while it is queued.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.num_cached_tokens: int | None = None
        self._abort = abort
        self._ready = threading.Condition()
        self._outputs: list[TokenOutput] = []
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._is_ended = False
        self._is_drained = False

    @property
    def is_ended(self) -> bool:
        """Whether the engine is done with the request; outputs may still wait to be read."""
        return self._is_ended

    def abort(self) -> None:
        """Ask the engine to stop; the stream then ends with ``finish="abort"``."""
        if not self._is_ended:
            self._abort(self.request_id)

    def admit(self, num_cached_tokens: int) -> None:
        """Say that the request runs; called by the engine thread only, the first call counts."""
        with self._ready:
            if self.num_cached_tokens is not None:
                return
            self.num_cached_tokens = num_cached_tokens
            self._notify()

    def put(self, output: TokenOutput) -> None:
        """Hand over one output; called by the engine thread only."""
        with self._ready:
            self._outputs.append(output)
            self._is_ended = output.finish is not None
            self._notify()

    def _notify(self) -> None:
        """Wake whoever waits; the lock is held."""
        waiter, self._waiter = self._waiter, None
        self._ready.notify_all()
        if waiter is not None:
            loop, future = waiter
            # the consumer's loop may have been closed in the meantime
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    def __iter__(self) -> Generator[TokenOutput, None, None]:
        """Yield outputs, blocking until there is one."""
        try:
            while not self._is_drained:
                with self._ready:
                    self._ready.wait_for(lambda: bool(self._outputs))
                    output = self._take()
                yield output
        finally:
            if not self._is_drained:
                self.abort()

    async def aiter(self) -> AsyncGenerator[TokenOutput, None]:
        """Yield outputs without blocking the running event loop."""
        loop = asyncio.get_running_loop()
        try:
            while not self._is_drained:
                future: asyncio.Future[None] = loop.create_future()
                with self._ready:
                    output = self._take() if self._outputs else None
                    if output is None:
                        self._waiter = (loop, future)
                if output is None:
                    await future
                else:
                    yield output
        finally:
            if not self._is_drained:
                self.abort()

    async def admitted(self) -> None:
        """Wait until the request runs or has ended; `num_cached_tokens` is known then.

        The outputs stay where they are; iterate afterwards, not at the same time.
        """
        loop = asyncio.get_running_loop()
        while True:
            future: asyncio.Future[None] = loop.create_future()
            with self._ready:
                if self.num_cached_tokens is not None or self._is_ended:
                    return
                self._waiter = (loop, future)
            await future

    def result(self) -> TokenOutput:
        """Wait for the end and return everything not read yet as one output."""
        return merge_outputs(list(self))

    def _take(self) -> TokenOutput:
        output = merge_outputs(self._outputs)
        self._outputs = []
        self._is_drained = output.finish is not None
        return output
