"""One choice of a chat reply: generated ids in, delivered deltas and the final message out.

Between the parser and the client stand the rules of chat-protocol.md sections 4.5-4.7: stop
strings on content, calls that were not wanted, hidden reasoning, ids of calls. Streamed and whole
replies run through the same object, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonlet.chat.call_ids import CallIdStyle, tool_call_id
from moonlet.chat.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    EngineFinish,
    Event,
    ReasoningDelta,
    ReasoningEnd,
    ToolStream,
    finish_reason,
)
from moonlet.chat.parser import Parser
from moonlet.chat.stop import StopStrings
from moonlet.chat.tokenizer import Tokenizer

__all__ = ["ChatChoice", "ChoiceOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """What a request wants of its choice.

    Attributes:
        thinking: The prompt opened the think channel.
        keep_calls: False drops tool calls (tool choice none, or no tool declared).
        one_call: End the message after its first call.
        show_reasoning: False withholds reasoning.
        stop: Stop strings on the content.
        tool_stream: How arguments stream.
        num_history_calls: Calls of the conversation so far; new ids count on from there.
        call_ids: Spelling of call ids.
    """

    thinking: bool
    keep_calls: bool = True
    one_call: bool = False
    show_reasoning: bool = True
    stop: tuple[str, ...] = ()
    tool_stream: ToolStream = "incremental"
    num_history_calls: int = 0
    call_ids: CallIdStyle = "underscore"


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[str] = field(default_factory=list)
    is_complete: bool = False


class ChatChoice:
    """Follows one choice from its first token to its message.

    Args:
        tokenizer: Vocabulary with the XTML names.
        options: What the request wants.

    Attributes:
        is_over: The message is complete although the engine may go on: abort it.
        num_tokens: Generated ids so far.
    """

    def __init__(self, tokenizer: Tokenizer, options: ChoiceOptions) -> None:
        self._options = options
        self._parser = Parser(
            tokenizer,
            "thinking" if options.thinking else "instruct",
            tool_stream=options.tool_stream,
            keep_calls=options.keep_calls,
        )
        self._stop = StopStrings(options.stop)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self._engine_finish: EngineFinish = "stop"
        self.is_over = False
        self.num_tokens = 0

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """Consume generated ids; return what the client gets for them."""
        self.num_tokens += len(ids)
        return self._deliver(self._parser.feed(ids))

    def finish(self, engine_finish: EngineFinish) -> list[Event]:
        """End the choice.

        Args:
            engine_finish: The engine's reason; of no account once `is_over`.

        Returns:
            The last deltas.
        """
        if self.is_over:
            return []
        self._engine_finish = engine_finish
        events = self._deliver(self._parser.finish(engine_finish))
        if not self.is_over:
            events += self._flush_content()
        self.is_over = True
        return events

    @property
    def finish_reason(self) -> str:
        """The reply's finish reason; final once the choice is over."""
        return finish_reason(self._engine_finish, sum(call.is_complete for call in self._calls))

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning text so far."""
        return self._parser.reasoning_tokens

    def call_id(self, index: int) -> str:
        """Return the id of a call of this message."""
        options = self._options
        return tool_call_id(
            self._calls[index].name, index, options.num_history_calls, options.call_ids
        )

    def message(self) -> dict[str, Any]:
        """Return the assistant message of a whole reply."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._options.thinking and self._options.show_reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        # a call cut by the length limit is shown as a streaming client has received it
        keep_cut = self._engine_finish == "length" and self._options.tool_stream == "incremental"
        calls = [
            {
                "id": self.call_id(index),
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for index, call in enumerate(self._calls)
            if call.is_complete or keep_cut
        ]
        if calls:
            message["tool_calls"] = calls
            message["content"] = message["content"] or None
        return message

    def _deliver(self, events: Iterable[Event]) -> list[Event]:
        delivered: list[Event] = []
        for event in events:
            if self.is_over:
                break
            delivered += self._take(event)
        return delivered

    def _take(self, event: Event) -> list[Event]:
        """Record one event; return its delivered form."""
        if isinstance(event, ReasoningDelta | ReasoningEnd):
            if isinstance(event, ReasoningDelta):
                self._reasoning.append(event.text)
            return [event] if self._options.show_reasoning else []
        if isinstance(event, ContentDelta):
            return self._take_content(event)
        if isinstance(event, CallStart):
            self._calls.append(_Call(event.name))
            return [*self._flush_content(), event]
        if isinstance(event, CallArguments):
            self._calls[event.index].arguments.append(event.text)
        elif isinstance(event, CallEnd):
            self._calls[event.index].is_complete = True
            self.is_over = self._options.one_call
        return [event]

    def _take_content(self, event: ContentDelta) -> list[Event]:
        if event.reclassified:
            self._reasoning.clear()
        text, matched = self._stop.push(event.text)
        self.is_over = matched is not None
        return self._add_content(text)

    def _flush_content(self) -> list[Event]:
        """Release text that was held as a possible stop string."""
        return self._add_content(self._stop.flush())

    def _add_content(self, text: str) -> list[Event]:
        if not text:
            return []
        self._content.append(text)
        return [ContentDelta(text)]
