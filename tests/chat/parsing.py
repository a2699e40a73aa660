"""Shared by the parser tests: small vocabularies, runs over split streams, replayed events."""

import base64
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from moonlet.chat.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    ParsedMessage,
    ReasoningDelta,
    ReasoningEnd,
)
from moonlet.chat.parser import Parser
from moonlet.chat.special_tokens import XTMLIds, k3_table
from moonlet.chat.text_adapter import TextAdapter

Stream = TypeVar("Stream", str, list[int])

O, C, S, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"  # noqa: E741
MARKUP = re.compile("(" + "|".join(map(re.escape, (O, C, S, END))) + ")")


class ByteTable:
    """A vocabulary of the 256 single bytes with K3's control tokens behind them."""

    num_ranks = 256
    names = k3_table(256).ids
    special_ids = XTMLIds.from_names(names)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,))

    def encode(self, text: str) -> list[int]:
        """Ordinary text: no spelling becomes a control token."""
        return list(text.encode())

    def encode_markup(self, text: str) -> list[int]:
        """Text in which the four XTML spellings are the control tokens."""
        pieces = MARKUP.split(text)
        return [i for p in pieces for i in ([self.names[p]] if p in self.names else p.encode())]


class GoldenTable:
    """The ordinary tokens that the golden parser vectors use."""

    def __init__(self, path: Path) -> None:
        stored = json.loads(path.read_text(encoding="utf-8"))
        self.num_ranks: int = stored["num_ranks"]
        self.special_ids = XTMLIds(**stored["special_ids"])
        self.bytes_by_id = {
            int(i): base64.b64decode(b) for i, b in stored["token_bytes_base64"].items()
        }

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes_by_id[token_id]


def tag(name: str, **attributes: str) -> str:
    return O + name + "".join(f' {key}="{value}"' for key, value in attributes.items()) + S


def close(name: str) -> str:
    return C + name + S


def split_at(stream: Stream, cuts: Iterable[int]) -> Iterator[Stream]:
    borders = [0, *sorted(cuts), len(stream)]
    for begin, end in itertools.pairwise(borders):
        yield stream[begin:end]


def one_by_one(stream: Stream) -> Iterator[Stream]:
    return split_at(stream, range(1, len(stream)))


def at_random(stream: Stream, rng: random.Random) -> Iterator[Stream]:
    cuts = rng.choices(range(len(stream) + 1), k=rng.randrange(len(stream) // 2 + 1))
    return split_at(stream, cuts)


def replay(events: Sequence[Event]) -> dict[str, Any]:
    """Rebuild the message from its events, checking their order on the way."""
    reasoning, content, is_over = "", "", False
    calls: list[list[str]] = []
    ended: set[int] = set()
    for position, event in enumerate(events):
        match event:
            case ReasoningDelta(text):
                assert text
                reasoning += text
            case ReasoningEnd():
                assert not is_over
                is_over = True
            case ContentDelta(text, reclassified):
                assert text
                content += text
                if reclassified:
                    assert position == len(events) - 1
                    # instruct mode shows no reasoning events, and no end of reasoning
                    assert reasoning == (text if is_over else "")
                    reasoning = ""
            case CallStart(index, name):
                assert name
                assert index == len(calls) == len(ended)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                assert index not in ended
                calls[index][1] += text
            case CallEnd(index):
                assert index == len(calls) - 1
                assert index not in ended
                ended.add(index)
    complete = [{"name": n, "arguments": a} for n, a in calls[: len(ended)]]
    cut = [{"name": n, "arguments_prefix": a} for n, a in calls[len(ended) :]]
    return {"reasoning": reasoning, "content": content, "calls": complete, "cut": cut}


def check_replay(events: Sequence[Event], message: ParsedMessage, tool_stream: str) -> None:
    """The events say the same as the message."""
    seen = replay(events)
    assert seen["reasoning"] == (message.reasoning_content or "")
    assert seen["content"] == message.content
    assert seen["calls"] == [asdict(call) for call in message.tool_calls]
    cut = [asdict(message.incomplete_call)] if message.incomplete_call else []
    assert seen["cut"] == (cut if tool_stream == "incremental" else [])


def run(
    parser: Parser | TextAdapter, chunks: Iterable[Any], engine_finish: Any = "stop"
) -> tuple[ParsedMessage, list[Event]]:
    events: list[Event] = []
    for chunk in chunks:
        events += parser.feed(chunk)
    events += parser.finish(engine_finish)
    return parser.result(), events


def parse(text: str, mode: Any = "thinking", finish: Any = "stop", **options: Any) -> ParsedMessage:
    """Parse markup through ids of single bytes; every way of cutting must agree."""
    table = ByteTable()
    ids = table.encode_markup(text)
    tool_stream = options.get("tool_stream", "incremental")
    whole, events = run(Parser(table, mode, **options), [ids], finish)
    check_replay(events, whole, tool_stream)
    single, events = run(Parser(table, mode, **options), one_by_one(ids), finish)
    check_replay(events, single, tool_stream)
    assert single == whole
    return whole


def as_golden(message: ParsedMessage) -> dict[str, Any]:
    """A message in the shape of the golden files."""
    found = asdict(message)
    del found["reasoning_tokens"]
    return found | {"flags": list(message.flags), "tool_calls": list(found["tool_calls"])}
