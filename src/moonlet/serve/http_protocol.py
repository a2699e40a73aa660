"""The connection side of the HTTP server, with the limits that uvicorn leaves open.

A request's head must be complete within a time and a size, so that a client that dribbles or never
ends its headers holds neither memory nor a connection. What is no HTTP gets the error body that
every other refusal has.
"""

from __future__ import annotations

import asyncio
import http
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moonlet.core.errors import RequestError
from moonlet.serve.errors import error_body
from moonlet.serve.request_id import access_logger

__all__ = ["MAX_HEAD_BYTES", "BoundedHttpProtocol"]

MAX_HEAD_BYTES = 65_536


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection whose request heads are bounded.

    Attributes:
        head_timeout_s: How long a head may take from its first byte, or from the connection's
            start; between two requests uvicorn's keep-alive timeout counts.
    """

    head_timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; refuse a head that has become too long."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Start the clock of another head."""
        self._is_in_head = True
        self._num_head_bytes = 0
        self._start_head_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop the clock: the head is complete."""
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, "this is no valid HTTP request")

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # the head of a pipelined request must not cost the reply that is being sent
            self._start_head_timer()
            return
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error body and close; the application never sees the request."""
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        request_id = uuid.uuid4().hex
        access_logger.info("%s refused with %d: %s", request_id, status, message)
        body = error_body(RequestError(message, status=status))
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: {request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
