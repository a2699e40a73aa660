"""From a chat body to token ids: thinking controls, rendering, encoding.

Precedence of the thinking controls: chat-protocol.md section 6.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moonlet.chat.options import EFFORTS
from moonlet.chat.render import render
from moonlet.chat.tokenizer import Tokenizer
from moonlet.chat.tool_results import assign_call_ids
from moonlet.core.errors import PromptTooLong, RequestError
from moonlet.serve.openai.refusals import has_tools
from moonlet.serve.openai.schema import PromptFields

__all__ = [
    "STUB_TOKENS",
    "ChatPrompt",
    "check_length",
    "encode_chat",
    "encode_text",
    "thinking_of",
]

STUB_TOKENS = 3
"""Tokens of the prompt's last open tag, which usage does not count (section 6.7)."""

DEFAULT_EFFORT = "max"
_NEAREST = {"minimal": "low", "medium": "high", "xhigh": "max"}
# encoding a text longer than this would hold up the event loop noticeably
_INLINE_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether the model thinks, and the effort it is told (None in instruct mode)."""

    is_on: bool
    effort: str | None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        ids: Token ids, generation prefix included.
        thinking: Whether the prefix opens the think channel.
    """

    ids: list[int]
    thinking: bool


def thinking_of(body: PromptFields, effort_fallback: Literal["error", "nearest"]) -> Thinking:
    """Decide the thinking mode and effort of a request.

    Raises:
        RequestError: The effort that counts is unknown (and ``nearest`` does not map it).
    """
    effort, param = _effort(body)
    # "none" is a mode, not an effort, and only as the top-level field
    is_none = effort == "none" and param == "reasoning_effort"
    switch = _switch(body)
    if switch is False or (switch is None and is_none):
        return Thinking(False, None)
    if effort is None or is_none:
        return Thinking(True, DEFAULT_EFFORT)
    if effort not in EFFORTS and effort_fallback == "nearest":
        effort = _NEAREST.get(effort, effort)
    if effort not in EFFORTS:
        raise RequestError(
            f"{param} is {effort[:80]!r}; supported are {', '.join(EFFORTS)} (and none as "
            "reasoning_effort)",
            param=param,
        )
    return Thinking(True, effort)


async def encode_chat(
    body: PromptFields,
    raw: Mapping[str, Any],
    tokenizer: Tokenizer,
    effort_fallback: Literal["error", "nearest"],
) -> ChatPrompt:
    """Render and encode a conversation.

    Args:
        body: The checked body.
        raw: The same as sent: messages and tools are rendered with the client's own fields.
        tokenizer: Vocabulary with the XTML names.
        effort_fallback: See `ServeConfig`.

    Raises:
        RequestError: The conversation cannot be rendered; `param` is the field path.
    """
    thinking = thinking_of(body, effort_fallback)
    segments = render(
        assign_call_ids(raw["messages"]),
        raw.get("tools") or None,
        thinking=thinking.is_on,
        thinking_effort=thinking.effort,
        tool_choice="none" if body.tool_choice == "none" and has_tools(body) else None,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    if sum(len(segment.text) for segment in segments) > _INLINE_CHARS:
        ids = await asyncio.to_thread(tokenizer.encode_segments, segments)
    else:
        ids = tokenizer.encode_segments(segments)
    return ChatPrompt(ids, thinking.is_on)


async def encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode a raw prompt; control names in it become control ids (section 6.1)."""
    if len(text) > _INLINE_CHARS:
        return await asyncio.to_thread(tokenizer.encode, text, True)
    return tokenizer.encode(text, allow_special=True)


def check_length(
    num_prompt: int,
    limit: int | None,
    max_model_len: int,
    *,
    prompt_field: str,
    limit_field: str,
) -> None:
    """Check that prompt and explicit output limit fit the context.

    Args:
        num_prompt: Tokens of the prompt.
        limit: Explicit output limit, None without one.
        max_model_len: Tokens of the context.
        prompt_field: Field to blame for a long prompt.
        limit_field: Field to blame for a limit that leaves the context.

    Raises:
        PromptTooLong: They do not; the message names both lengths.
    """
    if num_prompt >= max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and this server's context holds "
            f"{max_model_len}, output included; shorten the prompt",
            code="context_length_exceeded",
            param=prompt_field,
        )
    if limit is not None and num_prompt + limit > max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and {limit} more are asked for, but this "
            f"server's context holds {max_model_len}; ask for at most "
            f"{max_model_len - num_prompt}",
            code="context_length_exceeded",
            param=limit_field,
        )


def _effort(body: PromptFields) -> tuple[str | None, str]:
    """Return the first effort that is set, and where."""
    if body.thinking is not None and body.thinking.effort is not None:
        return body.thinking.effort, "thinking.effort"
    kwargs = body.chat_template_kwargs
    if kwargs is not None and kwargs.thinking_effort is not None:
        return kwargs.thinking_effort, "chat_template_kwargs.thinking_effort"
    return body.reasoning_effort, "reasoning_effort"


def _switch(body: PromptFields) -> bool | None:
    """Return whether thinking was switched on or off explicitly, None if neither."""
    if body.thinking is not None:
        return body.thinking.type == "enabled"
    kwargs = body.chat_template_kwargs
    if kwargs is None:
        return None
    return kwargs.thinking if kwargs.thinking is not None else kwargs.enable_thinking
