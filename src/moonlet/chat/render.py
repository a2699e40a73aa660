"""A conversation as XTML segments (chat-protocol.md section 3).

Zones, in order: tool declaration, thinking effort, the messages, tool choice, response format,
generation prefix. Rendering is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moonlet.chat.content import ImagePrompts, write_content
from moonlet.chat.options import (
    write_effort,
    write_response_format,
    write_tool_choice,
    write_tools,
)
from moonlet.chat.segments import Segment
from moonlet.chat.tool_arguments import write_arguments
from moonlet.chat.tool_results import Message, PlacedMessage, call_name, order_tool_results
from moonlet.chat.xtml import SegmentWriter
from moonlet.core.errors import RequestError

__all__ = ["PartialPrompt", "render", "render_partial"]

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class PartialPrompt:
    """A prompt that ends inside an assistant message.

    Attributes:
        segments: The prompt.
        channel: Where the model continues, hence where the parser starts.
    """

    segments: list[Segment]
    channel: Literal["think", "response"]


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    image_prompts: Iterable[str] | None = None,
) -> list[Segment]:
    """Render a conversation.

    Args:
        messages: Chat messages in OpenAI shape; not modified.
        tools: Tools declared before the conversation.
        thinking: Whether assistant messages have a think channel.
        thinking_effort: ``low``, ``high`` or ``max``; None writes no effort message. Without
            effect when ``thinking`` is False.
        tool_choice: ``required`` and ``none`` are told to the model, the rest is not.
        response_format: ``json_object`` and ``json_schema`` are told to the model.
        add_generation_prompt: Whether to end with the opening of the model's turn.
        image_prompts: One ``image_prompt`` per image part in rendering order (see
            ``image_parts``); None writes a placeholder without meaning to the model.

    Returns:
        Segments to encode one by one; those inside assistant messages that a model would write
        after the generation prefix are marked ``generated``.

    Raises:
        RequestError: A field has a wrong type or value; ``param`` holds its path.
    """
    _check_messages(messages)
    for index, message in enumerate(messages):
        if message.get("partial"):
            raise RequestError(
                f"messages[{index}].partial is set; use render_partial",
                param=f"messages[{index}].partial",
            )
    out = SegmentWriter()
    images = ImagePrompts(image_prompts)
    effort = thinking_effort if thinking else None
    write_tools(out, tools, "tools")
    write_effort(out, effort)
    _write_messages(out, messages, images, thinking)
    write_tool_choice(out, tool_choice)
    write_response_format(out, response_format)
    images.finish()
    if add_generation_prompt:
        out.open_tag("message", role="assistant")
        out.open_tag("think" if thinking else "response")
    return out.segments


def render_partial(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    image_prompts: Iterable[str] | None = None,
) -> PartialPrompt:
    """Render a conversation whose last assistant message the model shall continue (3.10).

    Takes the arguments of ``render``. The last message stays open: in thinking mode it continues
    in its response if it has content, else in its reasoning.

    Raises:
        RequestError: As ``render``; also if the last message is not an assistant message, has
            tool calls or image parts, or another message sets ``partial``.
    """
    _check_messages(messages)
    last = len(messages) - 1
    if last < 0 or messages[last]["role"] != "assistant":
        raise RequestError(
            "only a last message of role assistant can be continued", param="messages"
        )
    if messages[last].get("tool_calls"):
        raise RequestError(
            f"messages[{last}] has tool calls; a partial message cannot",
            param=f"messages[{last}].tool_calls",
        )
    segments = render(
        messages[:last],
        tools,
        thinking=thinking,
        thinking_effort=thinking_effort,
        tool_choice=tool_choice,
        response_format=response_format,
        add_generation_prompt=False,
        image_prompts=image_prompts,
    )
    out = SegmentWriter()
    channel = _write_open_message(out, messages[last], f"messages[{last}]", thinking)
    return PartialPrompt(segments + out.segments, channel)


def _write_open_message(
    out: SegmentWriter, message: Message, path: str, thinking: bool
) -> Literal["think", "response"]:
    """Write an assistant message without its closers; return the open channel."""
    content = SegmentWriter()
    write_content(content, message.get("content"), ImagePrompts(()), f"{path}.content")
    out.open_tag("message", role="assistant", **_name_attribute(message, path))
    if thinking:
        out.open_tag("think")
        out.text(_reasoning(message, path))
        if not content.segments:
            return "think"
        out.close_tag("think")
    out.open_tag("response")
    out.segments += content.segments
    return "response"


def _check_messages(messages: Sequence[Message]) -> None:
    """Check the shape of the list and of each message's role."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError("messages is not an array", param="messages")
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{path} is {type(message).__name__}; want an object", param=path)
        role = message.get("role")
        if role not in _ROLES:
            raise RequestError(
                f"{path}.role is {role!r}; want one of {', '.join(_ROLES)}", param=f"{path}.role"
            )
        if message.get("tools") and role not in ("system", "developer"):
            raise RequestError(
                f"{path}.tools is set on role {role}; only system messages declare tools",
                param=f"{path}.tools",
            )


def _write_messages(
    out: SegmentWriter, messages: Sequence[Message], images: ImagePrompts, thinking: bool
) -> None:
    for placed in order_tool_results(messages):
        message, path = placed.message, placed.path
        role = message["role"]
        if role == "assistant":
            _write_assistant(out, placed, images, thinking)
            continue
        if role in ("system", "developer") and message.get("tools"):
            write_tools(out, message["tools"], f"{path}.tools", dynamic=True)
            continue
        if role == "tool":
            out.open_tag("message", role="tool", tool=message["tool"], index=str(placed.tool_index))
        else:
            shown = "user" if role == "user" else "system"
            out.open_tag("message", role=shown, **_name_attribute(message, path))
        write_content(out, message.get("content"), images, f"{path}.content")
        out.end_message()


def _write_assistant(
    out: SegmentWriter, placed: PlacedMessage, images: ImagePrompts, thinking: bool
) -> None:
    """Write an assistant message; what follows the generation prefix is marked generated."""
    message, path = placed.message, placed.path
    out.open_tag("message", role="assistant", **_name_attribute(message, path))
    if thinking:
        out.open_tag("think")
        out.generated = True
        out.text(_reasoning(message, path))
        out.close_tag("think")
    out.open_tag("response")
    out.generated = True
    write_content(out, message.get("content"), images, f"{path}.content")
    out.close_tag("response")
    calls = message.get("tool_calls")
    if calls:
        out.open_tag("tools")
        for index, call in enumerate(calls):
            _write_call(out, call, index, f"{path}.tool_calls[{index}]")
        out.close_tag("tools")
    out.end_message()
    out.generated = False


def _write_call(out: SegmentWriter, call: Mapping[str, Any], index: int, path: str) -> None:
    function = call.get("function", call)
    out.open_tag("call", tool=call_name(call, path), index=str(index + 1))
    write_arguments(out, function.get("arguments"), f"{path}.function.arguments")
    out.close_tag("call")


def _reasoning(message: Message, path: str) -> str:
    """Return the reasoning to write: verbatim, or empty when it is white space only."""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise RequestError(
            f"{path}.reasoning_content is {type(reasoning).__name__}; want a string",
            param=f"{path}.reasoning_content",
        )
    return reasoning if reasoning.strip() else ""


def _name_attribute(message: Message, path: str) -> dict[str, str]:
    """Return the ``name`` attribute of a message header, if it has one."""
    name = message.get("name")
    if not name:
        return {}
    if not isinstance(name, str):
        raise RequestError(
            f"{path}.name is {type(name).__name__}; want a string", param=f"{path}.name"
        )
    return {"name": name}
