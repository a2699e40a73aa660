"""What a generator of training conversations returns.

A sample is a conversation in the message form of the OpenAI API. ``moonlet.chat.render`` turns it
into segments (with ``add_generation_prompt=False``); the loss is taken on the segments marked as
generated, so every assistant turn of the conversation is supervised.
"""

from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Style = Literal["low", "high", "max", "instruct"]

STYLES: tuple[Style, ...] = ("low", "high", "max", "instruct")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCall:
    """One tool call that a turn must make: the name and the typed arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What a correct reply to a turn looks like.

    Attributes:
        answer: The exact final response text in the style that training uses.
        calls: Calls that must come first, in order; empty when the turn needs no tool.
        results: Texts of the tool results, one per call.
        values: Pieces of the results that the final response must contain.
        category: Sub-family, for example ``"add"``, ``"decline"``, ``"call"``.
    """

    answer: str
    calls: tuple[ExpectedCall, ...] = ()
    results: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    category: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One user message with everything that follows until the assistant's final response.

    Attributes:
        task: Family: ``"arithmetic"``, ``"tools"``, ``"frame"`` or ``"copy"``.
        messages: The user message first, then assistant (and tool) messages.
        expect: The checkable outcome.
    """

    task: str
    messages: list[Message]
    expect: Expect

    @property
    def user(self) -> str:
        """Text of the user message."""
        return self.messages[0]["content"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A whole training conversation, ready for the renderer.

    Attributes:
        messages: Conversation in OpenAI form, system message included.
        tools: Declared tools in OpenAI form, or None.
        thinking: Whether the assistant has a think channel.
        thinking_effort: ``"low"``, ``"high"``, ``"max"`` or None (no effort message).
        task: ``"tools"`` when tools are declared, else the family of the first turn.
        turns: The turns that the messages were joined from.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    thinking: bool
    thinking_effort: str | None
    task: str
    turns: tuple[Turn, ...]


def assistant(
    style: Style, reasoning: str, content: str, tool_calls: list[Message] | None = None
) -> Message:
    """Build an assistant message; reasoning is left out in the ``instruct`` style."""
    message: Message = {"role": "assistant", "content": content}
    if style != "instruct":
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message
