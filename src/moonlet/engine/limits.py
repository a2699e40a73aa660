"""Bounds of one engine: steps, sequences, and budgets of priority classes."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from moonlet.core.errors import ConfigError, RequestError

__all__ = ["DEFAULT_CLASS", "PriorityClass", "SchedulerLimits", "parse_classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityClass:
    """Requests of one kind, with what they may hold together. None is no bound.

    A class with an exhausted budget waits; the classes after it go on.

    Attributes:
        name: What a request calls it.
        max_prompt_tokens: Longest prompt that comes here unasked.
        max_seqs: Sequences that run at the same time.
        max_tokens: Known tokens of the running sequences together.
        max_pages: Pages of the running sequences together.
    """

    name: str
    max_prompt_tokens: int | None = None
    max_seqs: int | None = None
    max_tokens: int | None = None
    max_pages: int | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("max_prompt_tokens", "max_seqs", "max_tokens", "max_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"priority class {self.name!r}: {name} is {value}; it must be positive"
                )


DEFAULT_CLASS = PriorityClass(name="default")


def parse_classes(text: str) -> tuple[PriorityClass, ...]:
    """Read priority classes from JSON: a list of objects with the fields of `PriorityClass`.

    Raises:
        ConfigError: Not such a list, an unknown field, or a value of the wrong kind.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the priority classes are not JSON: {error}") from error
    if not isinstance(raw, list) or not all(isinstance(entry, dict) for entry in raw):
        raise ConfigError(
            'the priority classes must be a list of objects like [{"name": "chat", '
            '"max_prompt_tokens": 8192}, {"name": "long"}]'
        )
    return tuple(_parse_class(entry) for entry in raw)


def _parse_class(entry: dict[str, Any]) -> PriorityClass:
    known = [field.name for field in fields(PriorityClass)]
    for name, value in entry.items():
        if name not in known:
            raise ConfigError(
                f"priority class field {name!r} is unknown; known: {', '.join(known)}"
            )
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, str) if name == "name" else not (is_number or value is None):
            kind = "text" if name == "name" else "an integer"
            raise ConfigError(f"priority class field {name} is {value!r}; want {kind}")
    if not entry.get("name"):
        raise ConfigError(f"priority class {entry} has no name; give it one")
    return PriorityClass(**entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one engine.

    Attributes:
        max_num_seqs: Sequences that hold states at the same time.
        max_num_batched_tokens: Tokens per step; at least ``max_num_seqs``, so that decoding
            never starves a prompt nor the reverse.
        max_model_len: Prompt and output of one request together.
        classes: Priority classes, the most important one first.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    classes: tuple[PriorityClass, ...] = (DEFAULT_CLASS,)

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}; it must be positive")
        if self.max_model_len < 2:
            raise ConfigError("engine.max_model_len is 1; a prompt and one token need 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens is {self.max_num_batched_tokens}, less than "
                f"engine.max_num_seqs {self.max_num_seqs}; every running sequence needs one token"
            )
        names = [known.name for known in self.classes]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"priority classes {names} must be at least one, with own names")

    def rank(self, priority: str | None, num_prompt_tokens: int) -> int:
        """Return the index of the class of a request.

        Raises:
            RequestError: No class has that name, or none takes a prompt of that length.
        """
        for rank, known in enumerate(self.classes):
            limit = known.max_prompt_tokens
            if priority is None and (limit is None or num_prompt_tokens <= limit):
                return rank
            if priority == known.name:
                return rank
        names = ", ".join(known.name for known in self.classes)
        if priority is None:
            raise RequestError(
                f"no priority class takes a prompt of {num_prompt_tokens} tokens; known: {names}",
                param="priority",
            )
        raise RequestError(f"priority is {priority!r}; there are {names}", param="priority")
