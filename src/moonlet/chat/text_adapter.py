"""The parser for engines that deliver text instead of token ids, and for tests.

Literal marker spellings count as markers here, so text that only mentions them is misread: use
`Parser` wherever ids are at hand (chat-protocol.md section 4.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from moonlet.chat.channels import ParserMode
from moonlet.chat.events import EngineFinish, Event, ParsedMessage, ToolStream
from moonlet.chat.machine import ChannelMachine
from moonlet.chat.special_tokens import END_OF_MSG
from moonlet.chat.tags import Marker

__all__ = ["TextAdapter"]


class TextAdapter:
    """Parses one generated message from text with literal markers.

    Args:
        mode: How the prompt ended, see `ChannelMachine`.
        start: Channel to start in where it differs from that of `mode`.
        tool_stream: "incremental" or "atomic" tool arguments.
        keep_calls: False drops the calls.
        end_spellings: Spellings of the stop tokens, as the engine displays them.

    Raises:
        ConfigError: An option is unknown.
    """

    def __init__(
        self,
        mode: ParserMode = "thinking",
        *,
        start: Literal["think", "response"] | None = None,
        tool_stream: ToolStream = "incremental",
        keep_calls: bool = True,
        end_spellings: Sequence[str] = (END_OF_MSG,),
    ) -> None:
        self._machine = ChannelMachine(
            mode, start=start, tool_stream=tool_stream, keep_calls=keep_calls
        )
        self._markers = {marker.value: marker for marker in Marker}
        self._spellings = (*self._markers, *end_spellings)
        self._split = re.compile("(" + "|".join(map(re.escape, self._spellings)) + ")").split
        self._held = ""

    @property
    def is_done(self) -> bool:
        """Whether the message is over; further text is ignored."""
        return self._machine.is_done

    def feed(self, text: str) -> list[Event]:
        """Consume the next text; what may be the beginning of a marker is held back."""
        # odd elements are marker spellings, the last one is the text after all of them
        *pieces, rest = self._split(self._held + text)
        for position, piece in enumerate(pieces):
            self._item(piece, is_spelling=position % 2 == 1)
        cut = len(rest) - self._num_held(rest)
        self._held = rest[cut:]
        self._item(rest[:cut], is_spelling=False)
        return self._machine.drain()

    def finish(self, engine_finish: EngineFinish = "stop") -> list[Event]:
        """End the stream; a partial marker at its end is text."""
        held, self._held = self._held, ""
        self._item(held, is_spelling=False)
        self._machine.finish(engine_finish)
        return self._machine.drain()

    def result(self) -> ParsedMessage:
        """Return the parsed message; final once `finish` was called."""
        return self._machine.result()

    def _item(self, piece: str, *, is_spelling: bool) -> None:
        if not is_spelling:
            if piece:
                self._machine.text(piece, num_tokens=0)
        elif piece in self._markers:
            self._machine.marker(self._markers[piece], num_tokens=0)
        else:
            self._machine.end()

    def _num_held(self, text: str) -> int:
        longest = max(map(len, self._spellings)) - 1
        for num_chars in range(min(longest, len(text)), 0, -1):
            tail = text[-num_chars:]
            if any(spelling.startswith(tail) for spelling in self._spellings):
                return num_chars
        return 0
