"""The channels of a generated message and the tags that lead between them.

This is the table of chat-protocol.md section 4.3; `machine` applies it and adds what a tag does
besides moving on.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

__all__ = ["ENDS_CALL", "IN_CALL", "NEXT", "START", "VALUES", "Channel", "ParserMode"]

ParserMode: TypeAlias = Literal["thinking", "instruct", "none"]


class Channel(Enum):
    """Where the stream is; the states of section 4.3."""

    THINK = "think"
    BETWEEN = "between"
    RESPONSE = "response"
    TOOLS = "tools"
    CALL = "call"
    ARG = "argument"
    JSON = "json"
    DONE = "done"


START: dict[str, Channel] = {
    "thinking": Channel.THINK,
    "instruct": Channel.RESPONSE,
    "none": Channel.BETWEEN,
}
VALUES = (Channel.ARG, Channel.JSON)
IN_CALL = (Channel.CALL, Channel.ARG, Channel.JSON)

# tags that lead from one channel to another; a known tag that is not listed is dropped
NEXT: dict[Channel, dict[str, Channel]] = {
    Channel.THINK: {
        "/think": Channel.BETWEEN,
        "response": Channel.RESPONSE,
        "tools": Channel.TOOLS,
        "call": Channel.CALL,
        "/response": Channel.BETWEEN,
        "think": Channel.THINK,
        "/message": Channel.DONE,
    },
    Channel.BETWEEN: {
        "think": Channel.THINK,
        "response": Channel.RESPONSE,
        "/response": Channel.BETWEEN,
        "tools": Channel.TOOLS,
        "call": Channel.CALL,
        "/message": Channel.DONE,
    },
    Channel.RESPONSE: {
        "/response": Channel.BETWEEN,
        "tools": Channel.TOOLS,
        "call": Channel.CALL,
        "think": Channel.THINK,
        "response": Channel.RESPONSE,
        "/message": Channel.DONE,
    },
    Channel.TOOLS: {
        "call": Channel.CALL,
        "/tools": Channel.BETWEEN,
        "response": Channel.RESPONSE,
        "think": Channel.THINK,
        "/message": Channel.DONE,
    },
}
# tags that end a call without its close tag and then act as in the tools channel
ENDS_CALL = ("call", "tools", "response", "think", "/tools", "/message")
