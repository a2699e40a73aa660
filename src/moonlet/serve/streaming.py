"""Server-sent events: the bytes of a streamed reply (chat-protocol.md section 6.6).

A frame is ``data: {json}`` and an empty line; the stream ends with ``data: [DONE]``. Whatever can
fail is checked before the first byte; a failure after it becomes an error frame and the stream
closes without ``[DONE]``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moonlet.core.errors import RequestError
from moonlet.serve.disconnect import aborting_on_disconnect
from moonlet.serve.errors import engine_failure, error_body

__all__ = ["DONE", "EventStream", "frame"]

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def frame(value: Mapping[str, Any]) -> bytes:
    """Return one event frame."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class EventStream(Response):
    """Sends frames as they come and stops the generation when nobody listens any more.

    Args:
        frames: The frames, without the final ``[DONE]``.
        abort: Ends the generation; called on disconnect and on failure.
        release: Called once when the response is over, whatever happened.
        headers: Further response headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        *,
        abort: Callable[[], None],
        release: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._frames = frames
        self._abort = abort
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            async with aborting_on_disconnect(receive, self._abort):
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                async for chunk in self._guarded():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._release()

    async def _guarded(self) -> AsyncIterator[bytes]:
        """Yield the frames and the end, or the error frame in its place."""
        try:
            async for chunk in self._frames:
                yield chunk
        except RequestError as error:
            self._abort()
            yield b"data: " + error_body(error) + b"\n\n"
        except Exception:
            self._abort()
            logger.exception("a stream failed")
            yield b"data: " + error_body(engine_failure()) + b"\n\n"
        else:
            yield DONE
