"""What the parser reports: stream events, the parsed message, finish reasons.

The events carry everything a streaming reply needs. Replaying them gives the same message as
`ParsedMessage`: content is the concatenation of the content deltas, reasoning that of the
reasoning deltas (empty once a `ContentDelta` says `reclassified`), and the arguments of a call
that of its argument deltas. Implements chat-protocol.md sections 4.1 and 4.6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ContentDelta",
    "EngineFinish",
    "Event",
    "EventLog",
    "IncompleteCall",
    "ParsedMessage",
    "ReasoningDelta",
    "ReasoningEnd",
    "ToolCall",
    "ToolStream",
    "finish_reason",
]

EngineFinish: TypeAlias = Literal["stop", "length", "abort", "error"]
ToolStream: TypeAlias = Literal["incremental", "atomic"]


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningEnd:
    """The think channel ended. Sent at most once, even if another think channel follows."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the response channel.

    `reclassified` marks the whole answer of a model that skipped its think channel: the text
    was already sent as reasoning and now counts as content instead.
    """

    text: str
    reclassified: bool = False


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts from 0 in order of appearance."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A tool call is complete."""

    index: int


Event: TypeAlias = (
    ReasoningDelta | ReasoningEnd | ContentDelta | CallStart | CallArguments | CallEnd
)


class EventLog:
    """Collects events until they are fetched; adjacent deltas of one kind become one."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        # each event with the texts to be appended to its own: joined once, so that a long
        # run of small pieces costs linear time
        self._entries: list[tuple[Event, list[str]]] = []

    def add(self, event: Event) -> None:
        """Append one event."""
        if self._entries:
            last, more = self._entries[-1]
            match last, event:
                case ReasoningDelta(), ReasoningDelta(text):
                    more.append(text)
                    return
                case ContentDelta(), ContentDelta(text, is_late) if is_late == last.reclassified:
                    more.append(text)
                    return
                case CallArguments(index), CallArguments(other, text) if index == other:
                    more.append(text)
                    return
        self._entries.append((event, []))

    def drain(self) -> list[Event]:
        """Return the events since the last call and forget them."""
        entries, self._entries = self._entries, []
        return [
            replace(event, text="".join([event.text, *more]))
            if more and not isinstance(event, ReasoningEnd | CallStart | CallEnd)
            else event
            for event, more in entries
        ]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call; `arguments` is JSON text (raw text after a malformed json block)."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class IncompleteCall:
    """A call that the end of the stream cut; `arguments_prefix` is what streaming has sent."""

    name: str
    arguments_prefix: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """The assistant message that a generated stream stands for.

    Attributes:
        reasoning_content: Text of the think channels; None in instruct mode, and without a
            generation prefix unless a think channel appeared.
        content: Text of the response channels, "" if none.
        tool_calls: Complete calls in order of appearance.
        incomplete_call: The call that was cut, or None.
        reclassified: The model skipped thinking, so its reasoning text became the content.
        ended: The message was closed, by a stop id or by its close tag.
        flags: Sorted names of the irregularities met; diagnostics only.
        reasoning_tokens: Tokens of reasoning text, tags excluded; 0 for text input.
        finish_reason: Finish reason of the choice; None before the parser was finished.
    """

    reasoning_content: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    incomplete_call: IncompleteCall | None = None
    reclassified: bool = False
    ended: bool = False
    flags: tuple[str, ...] = ()
    reasoning_tokens: int = 0
    finish_reason: str | None = None

    def message_calls(self, tool_stream: ToolStream = "incremental") -> tuple[ToolCall, ...]:
        """List the calls that a non-streamed reply carries.

        A call cut by the length limit comes last with its partial arguments, as a streaming
        client would have received it; it is left out in atomic mode and after any other end.
        """
        cut = self.incomplete_call
        if cut is None or tool_stream == "atomic" or self.finish_reason != "length":
            return self.tool_calls
        return (*self.tool_calls, ToolCall(cut.name, cut.arguments_prefix))

    def message_content(self, tool_stream: ToolStream = "incremental") -> str | None:
        """Return the content as the reply carries it: None when empty beside calls."""
        return self.content or (None if self.message_calls(tool_stream) else "")


def finish_reason(engine_finish: EngineFinish, num_calls: int) -> str:
    """Map the engine's reason to the one of the reply (section 4.6).

    Args:
        engine_finish: Why generation ended. A stop string counts as "stop".
        num_calls: Complete tool calls that are delivered.

    Returns:
        "tool_calls" after a regular stop with calls, else `engine_finish` itself.
    """
    return "tool_calls" if engine_finish == "stop" and num_calls else engine_finish
