"""Tool-call ids (chat-protocol.md section 4.5).

An id is opaque to the model; it only has to be unique within a conversation, so calls are
numbered over the whole history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from moonlet.core.errors import ConfigError

__all__ = ["CallIdStyle", "count_tool_calls", "tool_call_id"]

CallIdStyle: TypeAlias = Literal["underscore", "colon", "functions"]

_FORMATS = {"underscore": "{}_{}", "colon": "{}:{}", "functions": "functions.{}:{}"}


def count_tool_calls(messages: Iterable[Mapping[str, Any]]) -> int:
    """Count the tool calls of a conversation's assistant messages."""
    return sum(
        len(message.get("tool_calls") or ())
        for message in messages
        if message.get("role") == "assistant"
    )


def tool_call_id(
    name: str, position: int, num_history_calls: int = 0, style: CallIdStyle = "underscore"
) -> str:
    """Make the id of one call.

    Args:
        name: Tool name.
        position: Zero-based position of the call in its message.
        num_history_calls: Tool calls in the messages before, see `count_tool_calls`.
        style: "underscore" gives `name_0`, "colon" `name:0`, "functions" `functions.name:0`.

    Raises:
        ConfigError: Unknown style.
    """
    if style not in _FORMATS:
        raise ConfigError(f"tool call id style is {style!r}; use one of {tuple(_FORMATS)}")
    return _FORMATS[style].format(name, num_history_calls + position)
