"""Request bodies: size, encoding, JSON and schema are checked before anything else happens."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from moonlet.core.errors import RequestError
from moonlet.serve.errors import from_validation
from moonlet.serve.settings import ServeConfig

__all__ = ["BodyTimeout", "parse_json", "read_body", "validated"]

BodyT = TypeVar("BodyT", bound=BaseModel)


class BodyTimeout(RequestError):
    """The client was too slow; its connection is closed."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the body did not arrive within {timeout_s:g} s", status=408, code="body_timeout"
        )
        self.headers = {"Connection": "close"}


async def read_body(request: Request, config: ServeConfig) -> dict[str, Any]:
    """Read a request's JSON object.

    Raises:
        RequestError: The body is too large (413), takes too long (408), or is no JSON object in
            UTF-8 (400).
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > config.max_body_bytes:
        raise _too_large(config.max_body_bytes)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await _received(request, config.max_body_bytes)
    except TimeoutError as error:
        raise BodyTimeout(config.body_timeout_s) from error
    return parse_json(body)


async def _received(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object exactly: big integers stay whole, NaN and infinities are refused.

    Raises:
        RequestError: The bytes are no UTF-8, no JSON, or no object.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8: byte {error.start} cannot be decoded", code="invalid_utf8"
        ) from error
    try:
        data = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            # half a surrogate pair passes the parser but is no text
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not JSON: {reason}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise RequestError(f"the body is a JSON {type(data).__name__}; send an object")
    return data


def validated(model: type[BodyT], data: dict[str, Any]) -> BodyT:
    """Check a JSON object against a body model.

    Raises:
        RequestError: A field is missing or has a wrong type or value; `param` is its path.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from error


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body exceeds {max_bytes} bytes", status=413, type="request_too_large")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} does not fit a double")
    return value
