"""Bodies of the messages that tell the model its tools and options (chat-protocol.md 3.5, 3.6)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moonlet.chat.xtml import SegmentWriter
from moonlet.core.errors import RequestError

__all__ = [
    "EFFORTS",
    "write_effort",
    "write_response_format",
    "write_tool_choice",
    "write_tools",
]

EFFORTS = ("low", "high", "max")

_TOOLS = """# Tools
Here are the available tools, described in JSONSchema.

```json
{tools}
```"""
_NEW_TOOLS = """## New Tools Available
The system dynamically extends the toolset via lazy-loading.
You have access to all existing and extended tools.
Here are the specs for the extended tools.

```json
{tools}
```"""
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_TOOL_CHOICES = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)
_SCHEMA = "The JSON data must match the following schema:\n```json\n{schema}\n```"


def write_tools(out: SegmentWriter, tools: object, path: str, *, dynamic: bool = False) -> None:
    """Write a tool declaration; an empty list or None writes nothing.

    Args:
        out: Receives the segments.
        tools: Array of tool objects, written as given with keys sorted at every depth.
        path: Field path for errors.
        dynamic: Whether the tools extend the toolset in mid-conversation.

    Raises:
        RequestError: The tools are no array of objects or have no JSON form.
    """
    if not tools:
        return
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError(f"{path} is not an array", param=path)
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(
                f"{path}[{index}] is {type(tool).__name__}; want an object",
                param=f"{path}[{index}]",
            )
    template = _NEW_TOOLS if dynamic else _TOOLS
    _write_option(out, "tool-declare", template.format(tools=_sorted_json(tools, path)))


def write_effort(out: SegmentWriter, effort: str | None) -> None:
    """Write the thinking-effort message; None writes nothing.

    Raises:
        RequestError: The effort is none of ``EFFORTS``.
    """
    if effort is None:
        return
    if effort not in EFFORTS:
        raise RequestError(
            f"thinking effort is {effort!r}; supported are {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    _write_option(out, "thinking-effort", _EFFORT.format(effort=effort))


def write_tool_choice(out: SegmentWriter, choice: object) -> None:
    """Write the tool-choice message for ``required`` and ``none``; the rest writes nothing.

    Raises:
        RequestError: The choice is neither a known word nor a named function.
    """
    if choice is None or choice == "auto" or isinstance(choice, Mapping):
        return
    if not isinstance(choice, str) or choice not in _TOOL_CHOICES:
        raise RequestError(
            f"tool_choice is {choice!r}; want auto, none, required or a named function",
            param="tool_choice",
        )
    body = f"The system is invoked with `tool_choice={choice}`.\n{_TOOL_CHOICES[choice]}"
    _write_option(out, "tool-choice", body)


def write_response_format(out: SegmentWriter, response_format: object) -> None:
    """Write the response-format message for JSON answers; ``text`` or None writes nothing.

    Raises:
        RequestError: The format is no object or has an unknown type.
    """
    if response_format is None:
        return
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return
    if not isinstance(response_format, Mapping) or kind not in ("json_object", "json_schema"):
        raise RequestError(
            f"response_format.type is {kind!r}; want text, json_object or json_schema",
            param="response_format.type",
        )
    lines = [f"The system is invoked with `response_format={kind}`.", _RAW_JSON]
    if kind == "json_schema":
        schema: Any = response_format.get("json_schema")
        if isinstance(schema, Mapping) and "schema" in schema:
            schema = schema["schema"]
        dumped = _sorted_json(schema, "response_format.json_schema.schema")
        lines.append(_SCHEMA.format(schema=dumped))
    _write_option(out, "response-format", "\n".join(lines))


def _write_option(out: SegmentWriter, kind: str, body: str) -> None:
    out.open_tag("message", role="system", type=kind)
    out.text(body.strip())
    out.end_message()


def _sorted_json(value: object, path: str) -> str:
    """Dump compactly, keys sorted by code point at every depth, non-ASCII as it is."""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} has no JSON form: {error}", param=path) from error
