"""The state machine of the output parser (chat-protocol.md sections 4.2 to 4.4).

Its input is a sequence of items: text, the three markers, and the end of the message. The
faces in `parser` (token ids) and `text_adapter` (literal spellings) produce the items; the
machine never looks for markers in text.
"""

from __future__ import annotations

from typing import Literal

from moonlet.chat.arguments import CallBuilder
from moonlet.chat.channels import ENDS_CALL, IN_CALL, NEXT, START, VALUES, Channel, ParserMode
from moonlet.chat.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    EngineFinish,
    Event,
    EventLog,
    IncompleteCall,
    ParsedMessage,
    ReasoningDelta,
    ReasoningEnd,
    ToolCall,
    ToolStream,
    finish_reason,
)
from moonlet.chat.tags import Header, Marker, Tag
from moonlet.core.errors import ConfigError

__all__ = ["ChannelMachine"]


class ChannelMachine:
    """Turns items into events and one parsed message.

    Args:
        mode: How the prompt ended: "thinking" (inside a think channel), "instruct" (inside
            a response channel) or "none" (no assistant prefix).
        start: Channel to start in, where it differs from that of `mode` (a continued
            assistant prefix of section 3.10): "think", "response" or None.
        tool_stream: "incremental" sends arguments as they arrive, "atomic" sends a call in
            one piece when it is complete.
        keep_calls: False parses tool calls and then drops them (tool choice "none").

    Raises:
        ConfigError: `mode`, `start` or `tool_stream` is none of the listed values.
    """

    def __init__(
        self,
        mode: ParserMode = "thinking",
        *,
        start: Literal["think", "response"] | None = None,
        tool_stream: ToolStream = "incremental",
        keep_calls: bool = True,
    ) -> None:
        for field, value, choices in (
            ("mode", mode, tuple(START)),
            ("start", start, (None, "think", "response")),
            ("tool_stream", tool_stream, ("incremental", "atomic")),
        ):
            if value not in choices:
                raise ConfigError(f"{field} is {value!r}; use one of {choices}")
        self._state = START[mode] if start is None else Channel(start)
        self._incremental = tool_stream == "incremental"
        self._keep_calls = keep_calls
        self._mode = mode
        self._has_reasoning = mode == "thinking"
        self._at_start = mode == "none"
        self._header: Header | None = None
        self._flags: set[str] = set()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._held: list[str] = []
        self._calls: list[ToolCall] = []
        self._call: CallBuilder | None = None
        self._incomplete: IncompleteCall | None = None
        self._answered = self._state is Channel.RESPONSE
        self._reasoning_over = False
        self._is_orphan = False
        self._reclassified = False
        self._ended = False
        self._reasoning_tokens = 0
        self._finish_reason: str | None = None
        self._log = EventLog()

    @property
    def is_done(self) -> bool:
        """Whether the message is over and further items are ignored."""
        return self._state is Channel.DONE

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning text so far."""
        return self._reasoning_tokens

    def text(self, text: str, num_tokens: int) -> None:
        """Consume text that `num_tokens` ordinary tokens spelled (possibly "")."""
        if self._header is None:
            self._plain(text, num_tokens)
        elif not self._header.push(text, num_tokens):
            self._give_up_header()

    def marker(self, marker: Marker, num_tokens: int) -> None:
        """Consume a structural token."""
        if self._state is Channel.DONE:
            return
        if marker is Marker.SEP:
            self._separator(num_tokens)
            return
        self._give_up_header()
        in_value = self._state in VALUES
        if in_value and marker is Marker.OPEN:
            self._plain(marker.value, num_tokens)
        else:
            self._header = Header(marker, in_value=in_value, num_tokens=num_tokens)

    def end(self) -> None:
        """Consume a stop token: the message is over."""
        if self._state is Channel.DONE:
            return
        self._cut_header()
        if self._state in VALUES:
            self._cut_call()
        self._leave_call()
        self._ended = True
        self._enter(Channel.DONE)

    def finish(self, engine_finish: EngineFinish) -> None:
        """Close the stream; the finish reason and a reclassified answer are settled here."""
        self._cut_header()
        if self._state in IN_CALL:
            self._cut_call()
        self._state = Channel.DONE
        is_answer = not (self._calls or self._incomplete or self._content)
        if self._is_orphan and is_answer and not self._reclassified:
            self._reclassified = True
            self._content, self._reasoning = self._reasoning, []
            self._reasoning_tokens = 0
            if self._content:
                self._log.add(ContentDelta("".join(self._content), reclassified=True))
        num_calls = len(self._calls) if self._keep_calls else 0
        self._finish_reason = finish_reason(engine_finish, num_calls)

    def drain(self) -> list[Event]:
        """Return the events since the last call, adjacent deltas merged."""
        return self._log.drain()

    def result(self) -> ParsedMessage:
        """Return the message as it stands."""
        reasoning = "".join(self._reasoning) if self._has_reasoning else None
        return ParsedMessage(
            reasoning_content=reasoning,
            content="".join(self._content),
            tool_calls=tuple(self._calls) if self._keep_calls else (),
            incomplete_call=self._incomplete if self._keep_calls else None,
            reclassified=self._reclassified,
            ended=self._ended,
            flags=tuple(sorted(self._flags)),
            reasoning_tokens=self._reasoning_tokens,
            finish_reason=self._finish_reason,
        )

    # text of a channel

    def _plain(self, text: str, num_tokens: int) -> None:
        if self._state is Channel.THINK:
            self._reasoning_tokens += num_tokens
            self._add_reasoning(text)
        elif self._state is Channel.RESPONSE:
            self._add_content(text)
        elif self._state in VALUES:
            if self._call is not None:
                self._send_arguments(self._call.value_text(text))
        elif self._state is not Channel.DONE:
            self._stray(text)

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._reasoning.append(text)
            if self._mode != "instruct":
                self._log.add(ReasoningDelta(text))

    def _add_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._log.add(ContentDelta(text))

    def _stray(self, text: str) -> None:
        is_blank = not text or text.isspace()
        if self._state is Channel.BETWEEN and not self._answered:
            self._held.append(text)
            if not is_blank:
                self._flags.add("implicit_response")
                held = "".join(self._held)
                self._enter(Channel.RESPONSE)
                self._add_content(held)
        elif not is_blank:
            self._flags.add("dropped_text")

    # tags

    def _separator(self, num_tokens: int) -> None:
        header, self._header = self._header, None
        tag = header.tag() if header is not None else None
        if tag is not None and self._apply(tag):
            return
        if self._state not in VALUES:
            self._flags.add("unknown_tag")
        if header is None:
            self._plain(Marker.SEP.value, num_tokens)
        else:
            self._plain(header.literal() + Marker.SEP.value, header.num_tokens + num_tokens)

    def _give_up_header(self) -> None:
        header, self._header = self._header, None
        if header is not None:
            if self._state not in VALUES:
                self._flags.add("unknown_tag")
            self._plain(header.literal(), header.num_tokens)

    def _cut_header(self) -> None:
        if self._header is not None:
            self._flags.add("truncated_tag")
            self._header = None

    def _apply(self, tag: Tag) -> bool:
        """Act on a complete tag; False where it is literal text."""
        key = tag.key
        if self._state in VALUES:
            return self._value_tag(key)
        is_first, self._at_start = self._at_start, False
        if key == "message":
            if not is_first:
                self._leave_call()
                self._enter(Channel.DONE)
            return True
        if self._state is Channel.CALL:
            if key not in ENDS_CALL:
                self._call_tag(tag)
                return True
            self._leave_call()
        following = NEXT[self._state].get(key)
        if following is None:
            self._flags.add("misplaced_tag")
            return True
        self._note(key)
        if key == "call":
            self._start_call(tag.attributes.get("tool", ""))
        self._enter(following)
        return True

    def _note(self, key: str) -> None:
        if self._state is Channel.THINK:
            if key == "/response":
                self._is_orphan = True
                self._flags.add("orphan_response_close")
            elif key in ("response", "tools", "call"):
                self._flags.add("implicit_think_close")
        if key == "call" and self._state is not Channel.TOOLS:
            self._flags.add("implicit_tools_open")
        if key == "/response":
            self._answered = True
        if key == "/message":
            self._ended = True

    def _enter(self, channel: Channel) -> None:
        if self._state is Channel.THINK is not channel and not self._reasoning_over:
            self._reasoning_over = True
            if self._mode != "instruct":
                self._log.add(ReasoningEnd())
        if channel is Channel.THINK and self._mode != "instruct":
            self._has_reasoning = True
        if channel in (Channel.RESPONSE, Channel.TOOLS, Channel.CALL):
            self._answered = True
        self._held.clear()
        self._at_start = False
        self._state = channel

    # calls

    def _call_tag(self, tag: Tag) -> None:
        if tag.key == "/call":
            self._end_call()
        elif tag.key == "argument":
            self._state = Channel.ARG
            if self._call is not None:
                key, kind = tag.attributes.get("key", ""), tag.attributes.get("type", "string")
                self._send_arguments(self._call.open_argument(key, kind))
        elif tag.key == "json":
            self._state = Channel.JSON
            if self._call is not None:
                self._call.open_json()
        else:
            self._flags.add("misplaced_tag")

    def _value_tag(self, key: str) -> bool:
        if key == "/" + self._state.value:
            self._close_value()
            return True
        if key in ("/call", "/tools"):
            self._flags.add("implicit_value_close")
            self._close_value()
            self._end_call()
            if key == "/tools":
                self._enter(Channel.BETWEEN)
            return True
        if key == "/message":
            self._cut_call()
            self._ended = True
            self._enter(Channel.DONE)
            return True
        return False

    def _close_value(self) -> None:
        if self._call is not None:
            self._send_arguments(self._call.close_value())
        self._state = Channel.CALL

    def _start_call(self, name: str) -> None:
        if not name:
            self._flags.add("call_without_tool")
            return
        self._call = CallBuilder(name, self._flags)
        if self._incremental and self._keep_calls:
            self._log.add(CallStart(len(self._calls), name))

    def _leave_call(self) -> None:
        if self._state is Channel.CALL:
            self._flags.add("implicit_call_close")
            self._end_call()

    def _end_call(self) -> None:
        self._state = Channel.TOOLS
        call, self._call = self._call, None
        if call is None:
            return
        index, last_piece = len(self._calls), call.close()
        self._calls.append(ToolCall(call.name, call.arguments))
        if not self._keep_calls:
            return
        if not self._incremental:
            self._log.add(CallStart(index, call.name))
            last_piece = call.arguments
        if last_piece:
            self._log.add(CallArguments(index, last_piece))
        self._log.add(CallEnd(index))

    def _cut_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._flags.add("incomplete_call")
            self._incomplete = IncompleteCall(call.name, call.arguments)

    def _send_arguments(self, piece: str) -> None:
        if piece and self._incremental and self._keep_calls:
            self._log.add(CallArguments(len(self._calls), piece))
