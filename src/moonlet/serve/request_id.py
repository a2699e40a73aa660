"""Request ids: every response and every access line carries one.

A pure ASGI wrapper, so that it costs nothing per streamed chunk and adds no task in between.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestIdMiddleware", "access_logger", "request_id_of"]

access_logger = logging.getLogger("moonlet.serve.access")

_HEADER = b"x-request-id"
_ACCEPTED = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id_of(scope: Scope) -> str:
    """Return the id of the request that a scope belongs to, "-" outside the middleware."""
    return scope.get("moonlet.request_id", "-")


class RequestIdMiddleware:
    """Echoes or makes ``X-Request-Id`` and logs one line per request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(_HEADER, b"")
        # an id that could break a header or a log line is replaced
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["moonlet.request_id"] = request_id.decode()
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (_HEADER, request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            access_logger.info(
                "%s %s %s -> %d in %.0f ms",
                scope["moonlet.request_id"],
                scope["method"],
                scope["path"],
                status,
                (time.monotonic() - started) * 1e3,
            )
