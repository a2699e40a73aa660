"""Sessions: requests that follow each other, the next one made from the last answer.

A workload is a series of sessions, each made from the seed and its number alone, so the same
seed sends the same texts whatever the order of the answers.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from moonlet.bench.load.replay import Recorded
from moonlet.bench.load.settings import LoadSettings
from moonlet.bench.load.text import TextSource

__all__ = [
    "Conversation",
    "Prepared",
    "Replayed",
    "Session",
    "Turn",
    "make_sessions",
    "poisson",
    "replayed",
]

CHAT, TEXT = "/chat/completions", "/completions"


class Prepared(NamedTuple):
    """A request ready to be sent: the path below the base URL, and its bytes."""

    path: str
    body: bytes


class Turn(NamedTuple):
    """What a session adds before its next request, and the most tokens it wants back."""

    text: str
    max_tokens: int


class Session(Protocol):
    """What the runner plays; `index` is its number in the workload."""

    index: int

    @property
    def num_turns(self) -> int:
        """Requests it has in all."""
        ...

    def prepare(self, turn: int) -> Prepared:
        """Make the request of a turn; called once for each, in order."""
        ...

    def add_reply(self, message: dict[str, Any]) -> None:
        """Take the assistant message that answered the last request."""
        ...


@dataclass(slots=True)
class Conversation:
    """A session whose history grows by a text and by the server's own reply.

    A reply that calls tools gets the next text as the result of each call, any other one as a
    user message.

    Args:
        index: Its number in the workload.
        turns: What is added turn by turn.
        fields: What every body carries beside messages and length.
        system: System message, if any.
    """

    index: int
    turns: tuple[Turn, ...]
    fields: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with the system message."""
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    @property
    def num_turns(self) -> int:
        """Requests it has in all."""
        return len(self.turns)

    def prepare(self, turn: int) -> Prepared:
        """Add the turn's text and return the request with the whole history."""
        text, max_tokens = self.turns[turn]
        calls = self.messages[-1].get("tool_calls") if self.messages else None
        if calls:
            self.messages += (
                {"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls
            )
        else:
            self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": max_tokens, **self.fields}
        return Prepared(CHAT, json.dumps(body).encode())

    def add_reply(self, message: dict[str, Any]) -> None:
        """Append the server's reply as it came."""
        self.messages.append(message)


@dataclass(slots=True)
class Replayed:
    """A session of one recorded request.

    Args:
        index: Its number in the log.
        body: As recorded.
        fields: What replaces or adds to it.
    """

    index: int
    body: dict[str, Any]
    fields: dict[str, Any]

    @property
    def num_turns(self) -> int:
        """One."""
        return 1

    def prepare(self, turn: int) -> Prepared:
        """Return the request as recorded."""
        path = CHAT if "messages" in self.body else TEXT
        return Prepared(path, json.dumps({**self.body, **self.fields}).encode())

    def add_reply(self, message: dict[str, Any]) -> None:
        """Do nothing: what follows was recorded too."""


def make_sessions(
    settings: LoadSettings, source: TextSource, fields: dict[str, Any]
) -> Iterator[Session]:
    """Yield the sessions of a workload, without end where only requests or time bound it.

    Args:
        settings: Resolved settings of any workload but a replay.
        source: Where texts come from.
        fields: What every body carries, such as the model.
    """
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if settings.ignore_eos:
        streamed["ignore_eos"] = True
    fields = streamed | fields
    prefixes = _prefixes(settings, source)
    indices = itertools.count() if settings.sessions is None else range(settings.sessions)
    for index in indices:
        turns = _turns(settings, source, index)
        system = prefixes[index % len(prefixes)] if prefixes else None
        yield Conversation(index, turns, fields, system)


def _prefixes(settings: LoadSettings, source: TextSource) -> list[str]:
    if settings.groups is None or settings.prefix_len is None:
        return []
    return [
        source.text(random.Random(f"{settings.seed}/group/{group}"), settings.prefix_len)
        for group in range(settings.groups)
    ]


def _turns(settings: LoadSettings, source: TextSource, index: int) -> tuple[Turn, ...]:
    rng = random.Random(f"{settings.seed}/session/{index}")
    first, outputs = settings.lengths("prompt_len"), settings.lengths("output_len")
    later = first if settings.result_len is None else settings.lengths("result_len")
    drawn = (first, *itertools.repeat(later, (settings.turns or 1) - 1))
    return tuple(Turn(source.text(rng, x.draw(rng)), outputs.draw(rng)) for x in drawn)


def poisson(
    sessions: Iterator[Session], rate: float, seed: int | None
) -> Iterator[tuple[float, Session]]:
    """Yield sessions with the seconds at which they start, at random times of a mean rate.

    Args:
        sessions: Those of a workload.
        rate: Sessions per second.
        seed: Of the times; the same seed gives the same ones.
    """
    rng = random.Random(f"{seed}/arrivals")
    at_s = 0.0
    for session in sessions:
        at_s += rng.expovariate(rate)
        yield at_s, session


def replayed(log: Iterable[Recorded], fields: dict[str, Any]) -> Iterator[tuple[float, Session]]:
    """Yield the requests of a log with the seconds at which they start.

    Args:
        log: In the order of time.
        fields: What replaces or adds to the recorded bodies.
    """
    for index, (at_s, body) in enumerate(log):
        yield at_s, Replayed(index, body, fields)
