"""What an answer says, read after its bytes are there.

While a stream runs only bytes and the times of their arrival are kept; JSON is read when it has
ended. A token's time is that of the bytes that end its frame. Only frames that carry text count:
a token without any (markup, half a character) makes no frame, and tokens that a server sends
together make one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

__all__ = ["Arrival", "Reading", "read_body", "read_stream"]

BROKEN = "broken stream"
NO_DONE = "stream without [DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning")


class Arrival(NamedTuple):
    """Bytes and the time at which they came."""

    at_s: float
    data: bytes


@dataclass(slots=True)
class Reading:
    """What an answer turned out to be.

    Attributes:
        token_times_s: Times of the frames with text.
        message: The assistant message, to be sent back in the next turn.
        finish_reason: As the server said.
        usage: As the server said; empty when it said nothing.
        problem: Why the answer is no whole one, or None.
        detail: The server's own words for the problem.
    """

    token_times_s: list[float] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": ""})
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    detail: str = ""

    def count(self, name: str) -> int | None:
        """Return a count of the usage, None where the server gave none."""
        value = self.usage.get(name)
        return value if isinstance(value, int) else None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from the server's cache, None where it did not say."""
        details = self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if isinstance(value, int) else None


def read_stream(arrivals: Sequence[Arrival]) -> Reading:
    """Read a stream of server-sent events.

    Args:
        arrivals: Its bytes, cut anywhere, in the order in which they came.
    """
    reading = Reading()
    try:
        for at_s, data in _events(arrivals):
            if data == b"[DONE]":
                return reading
            frame = orjson.loads(data)
            if frame.get("error"):
                reading.problem, reading.detail = BROKEN, str(frame["error"])
                return reading
            if _read_frame(reading, frame):
                reading.token_times_s.append(at_s)
    except (ValueError, AttributeError, LookupError, TypeError):
        reading.problem = BROKEN
        return reading
    reading.problem = NO_DONE
    return reading


def read_body(data: bytes) -> Reading:
    """Read an answer that is one JSON object; it has no times of tokens."""
    reading = Reading()
    try:
        reply = orjson.loads(data)
        choice = reply["choices"][0]
        reading.message = choice.get("message") or reading.message
        reading.finish_reason = choice.get("finish_reason")
        reading.usage = reply.get("usage") or {}
    except (ValueError, AttributeError, LookupError, TypeError):
        reading.problem = "answer is no completion"
    return reading


def _events(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """Yield the data of each event with the time at which its line was complete."""
    rest = b""
    for at_s, data in arrivals:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield Arrival(at_s, line[5:].strip())


def _read_frame(reading: Reading, frame: dict[str, Any]) -> bool:
    """Add a frame to what is known; tell whether it carried text."""
    reading.usage = frame.get("usage") or reading.usage
    has_text = False
    for choice in frame.get("choices") or ():
        # further choices of one request have clocks of their own, which nobody asked for
        if choice.get("index", 0) != 0:
            continue
        reading.usage = choice.get("usage") or reading.usage
        reading.finish_reason = choice.get("finish_reason") or reading.finish_reason
        delta = choice.get("delta") or {"content": choice.get("text")}
        message = reading.message
        for name in _TEXTS:
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
                has_text = True
        for call in delta.get("tool_calls") or ():
            _add_call(message.setdefault("tool_calls", []), call)
            has_text = True
    return has_text


def _add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a part of a tool call to the calls of the message."""
    index = part.get("index", 0)
    while len(calls) <= index:
        function = {"name": "", "arguments": ""}
        calls.append({"id": "", "type": "function", "function": function})
    call = calls[index]
    call["id"] = part.get("id") or call["id"]
    for name, text in (part.get("function") or {}).items():
        call["function"][name] = call["function"].get(name, "") + (text or "")
