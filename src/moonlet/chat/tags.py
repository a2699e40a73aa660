"""XTML tags on the reading side: markers, headers, attributes (chat-protocol.md section 4.2).

A tag is a marker token (open or close), header text, and a separator token. A header is
accepted character by character and given up as soon as it cannot become a known tag any more,
so the decision does not depend on how the stream was cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from moonlet.chat.special_tokens import CLOSE, OPEN, SEP

__all__ = [
    "KNOWN_NAMES",
    "MAX_HEADER_CHARS",
    "VALUE_CLOSERS",
    "Header",
    "Marker",
    "Tag",
    "unescape_attribute",
]

KNOWN_NAMES = ("think", "response", "tools", "call", "argument", "json", "message")
# the only tags that mean something inside an argument value, all of them close tags
VALUE_CLOSERS = ("argument", "json", "call", "tools", "message")
MAX_HEADER_CHARS = 4096

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class Marker(Enum):
    """The three structural tokens, with their spelling in displayed text."""

    OPEN = OPEN
    CLOSE = CLOSE
    SEP = SEP


def unescape_attribute(value: str) -> str:
    """Undo the attribute escaping of section 3.2, in the reverse order of writing."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


@dataclass(frozen=True, slots=True)
class Tag:
    """A complete tag. `key` is the name, with a leading slash for a close tag."""

    key: str
    attributes: dict[str, str] = field(default_factory=dict)


class Header:
    """The text between a marker and its separator, while it arrives.

    Args:
        marker: The marker that began the tag, `OPEN` or `CLOSE`.
        in_value: The tag stands inside an argument value, where only the closers of
            `VALUE_CLOSERS` are possible and attributes are not.
        num_tokens: Tokens consumed so far, the marker included.
    """

    __slots__ = (
        "_attributes_allowed",
        "_length",
        "_name",
        "_names",
        "_parts",
        "_phase",
        "marker",
        "num_tokens",
    )

    def __init__(self, marker: Marker, *, in_value: bool, num_tokens: int) -> None:
        self.marker = marker
        self.num_tokens = num_tokens
        self._names = VALUE_CLOSERS if in_value else KNOWN_NAMES
        self._attributes_allowed = not in_value
        self._name = ""
        self._phase = "lead"
        self._length = 0
        self._parts: list[str] = []

    def push(self, text: str, num_tokens: int) -> bool:
        """Append text; return whether the header can still become a known tag."""
        self._parts.append(text)
        self._length += len(text)
        self.num_tokens += num_tokens
        if self._length > MAX_HEADER_CHARS:
            return False
        return self._phase == "attributes" or all(map(self._step, text))

    def literal(self) -> str:
        """Return the marker spelling and the text, for a tag that turned out to be none."""
        return self.marker.value + "".join(self._parts)

    def tag(self) -> Tag | None:
        """Return the tag that a separator completes now, or None if the name is unknown."""
        if self._name not in self._names:
            return None
        slash = "/" if self.marker is Marker.CLOSE else ""
        if self._phase != "attributes":
            return Tag(slash + self._name)
        found = _ATTRIBUTE.findall("".join(self._parts))
        return Tag(slash + self._name, {name: unescape_attribute(value) for name, value in found})

    def _step(self, char: str) -> bool:
        if self._phase == "attributes":
            return True
        if char.isspace():
            if self._phase == "name":
                self._phase = "tail"
            return True
        if self._phase == "tail":
            # text after the name: attributes, which need a complete name before them
            self._phase = "attributes"
            return self._attributes_allowed and self._name in self._names
        self._phase = "name"
        self._name += char
        return any(name.startswith(self._name) for name in self._names)
