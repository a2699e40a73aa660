"""Argument values: kinds of values, how a request spells them, and parameter concepts."""

import json
import random
from dataclasses import dataclass
from typing import Any

from moonlet.train.tasks.lexicon import Lexicon


@dataclass(frozen=True, slots=True)
class Value:
    """A typed argument and its spelling in a request."""

    value: Any
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Concept:
    """A parameter that requests speak about in a natural way.

    Attributes:
        names: Parameter names to choose from.
        kind: Value kind, see ``make_value``.
        phrases: Ways to give the value without the parameter's name; ``{v}`` is the value.
        slot: Concepts with the same slot never stand in one tool.
        describes: Descriptions to choose from.
    """

    names: tuple[str, ...]
    kind: str
    phrases: tuple[str, ...]
    slot: str
    describes: tuple[str, ...]


JSON_TYPES = {"int": "integer", "big": "integer", "number": "number", "bool": "boolean"}
CONCEPTS = (
    Concept(
        names=("city", "city", "location", "place", "city_name", "town", "destination"),
        kind="city", phrases=("in {v}", "in {v}", "for {v}", "at {v}"), slot="in",
        describes=("City name", "The city", "Name of the city", "The place"),
    ),
    Concept(
        names=("name", "person", "user", "recipient", "contact", "to", "username", "owner"),
        kind="person", phrases=("for {v}", "to {v}", "for {v}"), slot="for",
        describes=("Name of the person", "The person", "Who it is for", "User name"),
    ),
    Concept(
        names=("date", "day", "start_date", "when"), kind="date", phrases=("on {v}", "for {v}"),
        slot="on", describes=("Date, YYYY-MM-DD", "The date", "Day in ISO format"),
    ),
    Concept(
        names=("time", "hour", "start_time", "at"), kind="time", phrases=("at {v}",), slot="at",
        describes=("Time, HH:MM", "The time of day"),
    ),
    Concept(
        names=("title", "name", "label", "text", "note", "message"), kind="text",
        phrases=("called {v}", "named {v}", "with the title {v}", "saying {v}"), slot="called",
        describes=("Title", "The text", "A short text", "Name to use"),
    ),
    Concept(
        names=("color", "colour"), kind="color", phrases=("in {v}", "with color {v}"), slot="in",
        describes=("Color name", "The color"),
    ),
    Concept(
        names=("count", "quantity", "amount", "number", "n", "copies"), kind="int",
        phrases=("{v} times", "with {v} pieces", "{v} pieces"), slot="count",
        describes=("How many", "Number of items", "The amount"),
    ),
    Concept(
        names=("duration", "minutes"), kind="int", phrases=("for {v} minutes",), slot="for",
        describes=("Length in minutes", "Minutes"),
    ),
    Concept(
        names=("max_price", "budget", "price"), kind="number", phrases=("below {v}",
            "for {v} euros"),
        slot="below", describes=("Highest price", "Price"),
    ),
    Concept(
        names=("id", "code", "reference", "key"), kind="code",
        phrases=("with code {v}", "number {v}", "{v}"), slot="code",
        describes=("Identifier", "Reference code", "The code"),
    ),
)  # fmt: skip
# neutral parameter names, used with phrases that name the parameter
NEUTRAL_NAMES = {
    "string": (
        "name", "title", "query", "text", "message", "topic", "category", "label", "format", "mode",
        "source", "target", "path", "file", "subject", "body", "sender", "key", "tag", "group",
        "host",
        "symbol", "keyword", "address", "comment", "reason", "brand", "model", "department", "code",
    ),
    "integer": (
        "count", "limit", "id", "user_id", "order_id", "page", "year", "age", "quantity", "size",
        "level", "port", "days", "hours", "minutes", "seconds", "width", "height", "index", "depth",
        "rating", "priority", "retries", "seats", "guests", "floor", "zip", "max_results",
        "version",
    ),
    "number": (
        "amount", "price", "value", "weight", "distance", "temperature", "speed", "x", "y", "a",
        "b",
        "rate", "latitude", "longitude", "score", "radius", "factor", "percent", "budget", "volume",
    ),
    "boolean": (
        "enabled", "active", "urgent", "verbose", "public", "force", "notify", "dry_run", "premium",
        "visible", "recursive", "gift", "silent", "confirmed", "include_tax", "detailed", "express",
        "private", "repeat", "loud", "locked", "archived", "shared", "draft",
    ),
}  # fmt: skip
_TRUE = ("true", "true", "true", "on", "yes", "True")
_FALSE = ("false", "false", "false", "off", "no", "False")


def make_string(rng: random.Random, lexicon: Lexicon, difficulty: float) -> str:
    """Invent a short text of one to about five words; longer texts at a higher difficulty."""
    draw = rng.random()
    if draw < 0.6 - 0.4 * difficulty:
        return lexicon.pseudo_word(rng)
    if draw < 0.7:
        kinds = ("word", "person", "city", "code", "noun", "pair")
        return str(make_value(rng, lexicon, rng.choice(kinds)).value)
    return lexicon.fill(rng, lexicon.pick(rng, rng.choice(("TASKS", "QUERIES"))))


def make_long_string(rng: random.Random, lexicon: Lexicon) -> str:
    """Make a text of several pieces that is hard to copy: few distinct digits, codes, words."""
    pieces: list[str] = []
    for _ in range(rng.randint(2, 6)):
        draw = rng.random()
        if draw < 0.4:
            digits = rng.choices("0123456789", k=rng.randint(1, 4))
            pieces.append("".join(rng.choices(digits, k=rng.randint(2, 5))))
        elif draw < 0.55:
            pieces.append(f"{rng.randint(0, 999)}{rng.choice('+-')}{rng.randint(0, 999)}")
        else:
            pieces.append(make_string(rng, lexicon, 1.0))
    return rng.choice((" ", " ", ", ", "_")).join(pieces)


def _sometimes_lower(rng: random.Random, text: str) -> str:
    return text.lower() if rng.random() < 0.08 else text


def _listed(name: str) -> Any:
    return lambda rng, lexicon: lexicon.pick(rng, name)


def _code(rng: random.Random, lexicon: Lexicon) -> str:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    while True:
        head = "".join(rng.choice(letters) for _ in range(rng.randint(1, 3)))
        code = f"{head}{rng.choice(('-', '', '_'))}{rng.randint(1, 9999)}"
        if lexicon.allows("code", code):
            return code


def _date(rng: random.Random, _lexicon: Lexicon) -> str:
    if rng.random() < 0.2:
        return rng.choice(("today", "tomorrow", "Monday", "Tuesday", "next Friday", "May 4"))
    return f"20{rng.randint(20, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return f"{rng.randint(1, 12)}{rng.choice((' ', ''))}{rng.choice(('am', 'pm'))}"
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, 45, 20)):02}"


def _person(rng: random.Random, lexicon: Lexicon) -> str:
    first = lexicon.pick(rng, "NAMES")
    if rng.random() < 0.4:
        first = lexicon.pseudo_word(rng).capitalize()
    if rng.random() < 0.3:
        return f"{first} {lexicon.pick(rng, 'SURNAMES')}"
    return first


def _word(rng: random.Random, lexicon: Lexicon) -> str:
    word = lexicon.pseudo_word(rng)
    return word.capitalize() if rng.random() < 0.5 else word


_STRINGS: dict[str, Any] = {
    "city": lambda rng, lx: _sometimes_lower(rng, lx.city(rng)),
    "city_country": lambda rng, lx: f"{lx.city(rng)}, {lx.pick(rng, 'COUNTRIES')}",
    "country": _listed("COUNTRIES"),
    "person": _person,
    "date": _date,
    "time": lambda rng, lx: _time(rng),
    "digits": lambda rng, lx: str(rng.randint(10, rng.choice((999, 99999)))),
    "text": lambda rng, lx: lx.fill(rng, lx.pick(rng, "TASKS")),
    "query": lambda rng, lx: lx.fill(rng, lx.pick(rng, "QUERIES")),
    "color": _listed("COLORS"),
    "language": _listed("LANGUAGES"),
    "currency": _listed("CURRENCIES"),
    "unit": _listed("UNITS"),
    "size": _listed("SIZES"),
    "level": _listed("LEVELS"),
    "device": _listed("DEVICES"),
    "room": _listed("ROOMS"),
    "ticker": _listed("TICKERS"),
    "condition": _listed("CONDITIONS"),
    "celsius": lambda rng, lx: rng.choice(("celsius", "fahrenheit")),
    "noun": lambda rng, lx: lx.noun(rng),
    "word": _word,
    "code": _code,
    "pair": lambda rng, lx: f"{lx.pick(rng, 'ADJECTIVES')} {lx.noun(rng)}",
    "email": lambda rng, lx: f"{lx.pseudo_word(rng)}@{lx.pseudo_word(rng)}.com",
    "expression": lambda rng, lx: _expression(rng),
}


def _expression(rng: random.Random) -> str:
    def number() -> str:
        return str(rng.randint(1, rng.choice((20, 99, 999))))

    gap = rng.choice(("", " "))
    text = f"{number()}{gap}{rng.choice('+-**/')}{gap}{number()}"
    if rng.random() < 0.2:
        text = f"{text}{gap}{rng.choice('+-*')}{gap}{number()}"
    return text


def make_value(rng: random.Random, lexicon: Lexicon, kind: str) -> Value:
    """Draw a value of a kind.

    Args:
        rng: Source of randomness.
        lexicon: Side of the split.
        kind: ``int``, ``big``, ``number``, ``bool`` or the name of a string kind.

    Returns:
        The typed value and its usual spelling (for a boolean: true/on/yes or false/off/no).
    """
    if kind == "int":
        number = rng.randint(1, rng.choice((9, 30, 99, 500)))
        return Value(number, str(number))
    if kind == "big":
        number = rng.randint(10, rng.choice((999, 9999, 99999)))
        return Value(number, str(number))
    if kind == "number":
        if rng.random() < 0.5:
            number = rng.randint(0, rng.choice((20, 100, 999, 5000)))
            return Value(number, str(number))
        decimal = rng.randint(1, 9999) / rng.choice((10, 10, 100))
        return (
            Value(decimal, json.dumps(decimal))
            if decimal % 1
            else Value(int(decimal), str(int(decimal)))
        )
    if kind == "bool":
        flag = rng.random() < 0.5
        return Value(flag, rng.choice(_TRUE if flag else _FALSE))
    text = _STRINGS[kind](rng, lexicon)
    return Value(text, text)


def json_type(kind: str) -> str:
    """Return the JSON schema type of a value kind."""
    return JSON_TYPES.get(kind, "string")
