"""Arguments of a tool call as XTML argument blocks (chat-protocol.md section 3.4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moonlet.chat.arguments import dump_json
from moonlet.chat.xtml import SegmentWriter
from moonlet.core.errors import RequestError

__all__ = ["json_type", "write_arguments"]


def json_type(value: object) -> str:
    """Return the ``type`` attribute of a JSON value.

    Raises:
        TypeError: The value has no JSON form.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, list | tuple):
        return "array"
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_arguments(out: SegmentWriter, arguments: object, path: str) -> None:
    """Write the argument blocks of one call.

    A string that is no JSON goes verbatim into a ``json`` block: the form a truncated call has
    in a history. The model never produces that block, so it is not marked as generated.

    Args:
        out: Receives the segments.
        arguments: A JSON object as mapping or string; None or blank means no arguments.
        path: Field path for errors.

    Raises:
        RequestError: The arguments are JSON but no object, or have no JSON form.
    """
    if arguments is None:
        return
    if isinstance(arguments, str):
        if not arguments.strip():
            return
        try:
            parsed = json.loads(arguments)
        except ValueError:
            _write_raw(out, arguments)
            return
        except RecursionError as error:
            raise RequestError(f"{path} is nested too deeply", param=path) from error
    else:
        parsed = arguments
    if not isinstance(parsed, Mapping):
        raise RequestError(
            f"{path} is {_kind(parsed)}; tool call arguments must be a JSON object", param=path
        )
    for key, value in parsed.items():
        _write_argument(out, key, value, path)


def _write_argument(out: SegmentWriter, key: object, value: Any, path: str) -> None:
    if not isinstance(key, str):
        raise RequestError(f"{path} has the key {key!r}; keys must be strings", param=path)
    try:
        kind = json_type(value)
        text = value if isinstance(value, str) else dump_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{path}.{key} has no JSON form: {error}", param=path) from error
    out.open_tag("argument", key=key, type=kind)
    out.text(text)
    out.close_tag("argument")


def _write_raw(out: SegmentWriter, arguments: str) -> None:
    generated, out.generated = out.generated, False
    out.open_tag("json", type="object")
    out.text(arguments)
    out.close_tag("json")
    out.generated = generated


def _kind(value: object) -> str:
    try:
        return f"a JSON {json_type(value)}"
    except TypeError:
        return f"a {type(value).__name__}"
