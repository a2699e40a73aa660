"""Chunks of a streamed chat reply (chat-protocol.md section 6.6).

Order: the role, increments, the end with its usage, the usage chunk if asked for. Every chunk of
a choice holds exactly that choice, and an increment carries one of reasoning, content, calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonlet.chat.events import (
    CallArguments,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
    ReasoningEnd,
)
from moonlet.serve.openai.choice import ChatChoice
from moonlet.serve.openai.schema import StreamOptions
from moonlet.serve.openai.usage import Usage
from moonlet.serve.streaming import frame

__all__ = ["ChatFrames"]


class ChatFrames:
    """Makes the frames of one streamed reply.

    Args:
        reply_id: ``chatcmpl-`` id of the reply.
        created: Seconds since the epoch.
        model: Served model name.
        options: The request's stream options.
    """

    def __init__(self, reply_id: str, created: int, model: str, options: StreamOptions) -> None:
        self._head = {
            "id": reply_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._options = options

    def role(self) -> bytes:
        """Return the first frame."""
        return self._choice({"role": "assistant", "content": ""})

    def increment(
        self,
        event: Event,
        choice: ChatChoice,
        usage: Usage | None,
        *,
        ids: Sequence[int] = (),
        logprobs: list[dict[str, Any]] | None = None,
    ) -> bytes | None:
        """Return the frame of one event, None where the event shows nothing.

        Args:
            event: What the choice delivered.
            choice: The choice, which knows its call ids.
            usage: Counts so far, for ``continuous_usage_stats``.
            ids: Generated ids since the last frame, for ``include_internal_content``.
            logprobs: Entries since the last frame, where the request asked for them.
        """
        delta = _delta(event, choice)
        if delta is None:
            return None
        if self._options.include_internal_content:
            delta["internal_content"] = {"token_ids": list(ids)}
        return self._choice(delta, usage=usage, logprobs=logprobs)

    def end(
        self, finish_reason: str, usage: Usage, logprobs: list[dict[str, Any]] | None = None
    ) -> bytes:
        """Return the last frame of the choice."""
        return self._choice(
            {}, finish_reason=finish_reason, final_usage=usage, usage=usage, logprobs=logprobs
        )

    def usage(self, usage: Usage) -> bytes | None:
        """Return the usage frame where ``include_usage`` asks for it."""
        if not self._options.include_usage:
            return None
        return frame({**self._head, "choices": [], "usage": usage.to_json()})

    def _choice(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        final_usage: Usage | None = None,
        usage: Usage | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> bytes:
        entry: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if logprobs is not None:
            entry["logprobs"] = {"content": logprobs}
        if final_usage is not None:
            entry["usage"] = final_usage.to_json()
        chunk: dict[str, Any] = {**self._head, "choices": [entry]}
        if self._options.continuous_usage_stats and usage is not None:
            chunk["usage"] = usage.to_json()
        return frame(chunk)


def _delta(event: Event, choice: ChatChoice) -> dict[str, Any] | None:
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ReasoningEnd):
        return {"reasoning_content": ""}
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": choice.call_id(event.index), "type": "function"}
        return {"tool_calls": [{**call, "function": function}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
