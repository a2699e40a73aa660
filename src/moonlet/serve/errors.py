"""One exception tree becomes the OpenAI error body, here and nowhere else.

Body and types: chat-protocol.md section 6.8. A `RequestError` carries its own answer; any other
exception is a 500 that tells the client nothing but its request id, with the traceback in the log.
"""

from __future__ import annotations

import logging
import re
import reprlib
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from moonlet.core.errors import CapacityError, RequestError
from moonlet.serve.request_id import request_id_of

__all__ = [
    "Draining",
    "Overloaded",
    "engine_failure",
    "error_body",
    "error_response",
    "from_validation",
    "install_error_handlers",
    "unsupported",
]

logger = logging.getLogger(__name__)

_STATUS_TYPES = {404: "resource_not_found_error", 413: "request_too_large"}
_MAX_SHOWN = 80
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_EXPECTATION = "Input should be "
_OBJECT = re.compile(r"a valid dictionary or instance of \w+")
# what pydantic calls the branches of a union inside a location
_BRANCHES = frozenset({"str", "int", "float", "bool", "NamedToolChoice"})


class Overloaded(RequestError):
    """The server has as many requests as it may hold."""

    def __init__(self, num_requests: int, retry_after_s: int) -> None:
        super().__init__(
            f"the server is answering {num_requests} requests, its limit; retry in "
            f"{retry_after_s} s",
            status=429,
            type="engine_overloaded_error",
            code="engine_overloaded",
        )
        self.headers = {"Retry-After": str(retry_after_s)}


class Draining(RequestError):
    """The server is shutting down and takes no new work."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            "the server is shutting down; retry on another one",
            status=503,
            type="server_error",
            code="draining",
        )
        self.headers = {"Retry-After": str(retry_after_s)}


def unsupported(message: str, param: str) -> RequestError:
    """Return the refusal of a field that this server knows but does not implement."""
    return RequestError(message, code="unsupported", param=param)


def engine_failure(
    finish: Literal["error", "abort"] = "error", cause: str | None = None
) -> RequestError:
    """Return the answer to a request whose generation failed or was ended from outside."""
    if finish == "abort":
        message = "the generation was aborted before its end"
    else:
        message = f"generation failed: {cause or 'the log of the server has the cause'}"
    return RequestError(message, status=500, type="server_error", code=f"engine_{finish}")


def from_validation(error: ValidationError) -> RequestError:
    """Turn the first complaint of a body model into a request error with its field path.

    A field that may have several types has one complaint per type. The one that got furthest into
    the value is what the client meant; complaints at the same place are joined.
    """
    details = error.errors(include_url=False, include_context=False)
    root = field_path(details[0]["loc"])
    same_field = [detail for detail in details if field_path(detail["loc"]).startswith(root)]
    chosen = max(same_field, key=lambda detail: len(detail["loc"]))
    path = field_path(chosen["loc"])
    messages = [
        _OBJECT.sub("an object", detail["msg"].removeprefix(_EXPECTATION))
        for detail in same_field
        if field_path(detail["loc"]) == path
    ]
    message = " or ".join(dict.fromkeys(messages))
    if chosen["msg"].startswith(_EXPECTATION):
        message = f"should be {message}"
    seen = "" if chosen["type"] == "missing" else f"; seen {_shown(chosen['input'])}"
    return RequestError(f"{path or 'body'}: {message}{seen}", param=path or None)


def field_path(loc: tuple[int | str, ...]) -> str:
    """Spell a location as ``messages[2].content``; names of union branches are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            path += f".{part}" if path else part
    return path


def error_body(error: RequestError) -> bytes:
    """Return the JSON body of an error."""
    fields = {
        "message": error.message,
        "type": error.type,
        "code": error.code,
        "param": error.param,
    }
    return orjson.dumps({"error": fields})


def error_response(error: RequestError) -> Response:
    """Return the HTTP answer of an error."""
    headers: dict[str, str] = getattr(error, "headers", {})
    return Response(error_body(error), error.status, headers=headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Make an application answer every failure with the error body."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(CapacityError, _on_capacity_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_failure)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_capacity_error(request: Request, error: Exception) -> Response:
    return error_response(RequestError(str(error), code="over_capacity"))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router itself refuses: unknown path, unknown method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        message = f"no such path: {path[:_MAX_SHOWN]}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {path[:_MAX_SHOWN]}"
    else:
        message = error.detail
    kind = _STATUS_TYPES.get(error.status_code, "invalid_request_error")
    refusal = RequestError(message, status=error.status_code, type=kind)
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response


async def _on_failure(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request.scope)
    logger.error("request %s failed", request_id, exc_info=error)
    failure = RequestError(
        f"internal error in request {request_id}; the server's log has the cause",
        status=500,
        type="server_error",
        code="internal_error",
    )
    response = error_response(failure)
    # this answer is sent from outside the request-id middleware
    response.headers["X-Request-Id"] = request_id
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that left while sending its body: nobody reads this."""
    return Response(status_code=499)


def _shown(value: Any) -> str:
    """Return a short form of whatever a client sent; cut in depth as well as in length."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
