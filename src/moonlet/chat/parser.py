"""The output parser: generated token ids to reasoning, content and tool calls.

Structure comes from token ids alone. Text that merely spells a marker, made of ordinary tokens,
stays text (chat-protocol.md section 4.1). Results do not depend on how the stream is cut.

    parser = Parser(tokenizer, mode="thinking")
    for output in stream:
        events = parser.feed(output.ids)
    events = parser.finish("stop")
    message = parser.result()

One parser serves one choice of one request; it shares nothing with other parsers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal, Protocol

from moonlet.chat.channels import ParserMode
from moonlet.chat.events import EngineFinish, Event, ParsedMessage, ToolStream
from moonlet.chat.machine import ChannelMachine
from moonlet.chat.special_tokens import ABSENT, XTMLIds
from moonlet.chat.tags import Marker
from moonlet.core.errors import ConfigError

__all__ = ["Parser", "ParserMode", "TokenTable"]


class TokenTable(Protocol):
    """What the parser needs of a tokenizer; `Tokenizer` satisfies it."""

    @property
    def special_ids(self) -> XTMLIds:
        """The control ids."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of ordinary tokens; every id from here on is special."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of an ordinary token."""
        ...


class Parser:
    """Parses one generated message from token ids.

    Args:
        tokens: The vocabulary, usually the `Tokenizer`.
        mode: How the prompt ended, see `ChannelMachine`.
        start: Channel to start in where it differs from that of `mode` (assistant prefix).
        tool_stream: "incremental" or "atomic" tool arguments.
        keep_calls: False drops the calls (tool choice "none").

    Raises:
        ConfigError: The vocabulary lacks a structural token, or an option is unknown.
    """

    def __init__(
        self,
        tokens: TokenTable,
        mode: ParserMode = "thinking",
        *,
        start: Literal["think", "response"] | None = None,
        tool_stream: ToolStream = "incremental",
        keep_calls: bool = True,
    ) -> None:
        ids = tokens.special_ids
        self._markers: dict[int, Marker] = {}
        for marker, token_id in (
            (Marker.OPEN, ids.open),
            (Marker.CLOSE, ids.close),
            (Marker.SEP, ids.sep),
        ):
            if token_id == ABSENT:
                raise ConfigError(
                    f"the vocabulary has no {marker.value}; chat needs the XTML tokens"
                )
            self._markers[token_id] = marker
        self._ends = {ids.end_of_msg, ids.eos, ids.eot} - {ABSENT}
        self._first_special = tokens.num_ranks
        self._token_bytes = tokens.token_bytes
        self._machine = ChannelMachine(
            mode, start=start, tool_stream=tool_stream, keep_calls=keep_calls
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_done(self) -> bool:
        """Whether the message is over; further ids are ignored."""
        return self._machine.is_done

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """Consume the next generated ids.

        Args:
            ids: Any number of ids, in order, stop ids included.

        Returns:
            The events they cause; adjacent deltas are merged.
        """
        run: list[bytes] = []
        for token_id in ids:
            if token_id < self._first_special:
                run.append(self._token_bytes(token_id))
                continue
            # every special token breaks a pending UTF-8 sequence, also one that is dropped
            self._text(run, is_final=True)
            run = []
            marker = self._markers.get(token_id)
            if marker is not None:
                self._machine.marker(marker, num_tokens=1)
            elif token_id in self._ends:
                self._machine.end()
        self._text(run, is_final=False)
        return self._machine.drain()

    def finish(self, engine_finish: EngineFinish = "stop") -> list[Event]:
        """End the stream.

        Args:
            engine_finish: Why the engine stopped; a matched stop string counts as "stop".

        Returns:
            The last events, among them the answer of a model that skipped its think channel.
        """
        self._text([], is_final=True)
        self._machine.finish(engine_finish)
        return self._machine.drain()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning text so far; as in `result`, without putting the message together."""
        return self._machine.reasoning_tokens

    def result(self) -> ParsedMessage:
        """Return the parsed message; final once `finish` was called."""
        return self._machine.result()

    def _text(self, run: list[bytes], *, is_final: bool) -> None:
        text = self._decoder.decode(b"".join(run), is_final)
        if text or run:
            self._machine.text(text, num_tokens=len(run))
