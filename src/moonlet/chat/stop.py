"""Stop strings over a stream of text (chat-protocol.md section 4.7).

Serve feeds the content channel only. Text that may be the beginning of a stop string is held
back; the result does not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moonlet.core.errors import ConfigError

__all__ = ["StopMatch", "StopStrings"]


class StopMatch(NamedTuple):
    """Text that may be sent now, and the stop string that was found (None if none yet)."""

    text: str
    matched: str | None


class _Pattern:
    """One stop string and how much of it the text so far ends with (Knuth-Morris-Pratt)."""

    __slots__ = ("_failure", "length", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        self._failure = [0] * len(string)
        length = 0
        for position in range(1, len(string)):
            while length and string[position] != string[length]:
                length = self._failure[length - 1]
            length += string[position] == string[length]
            self._failure[position] = length

    def push(self, char: str) -> bool:
        """Advance by one character; return whether the whole string has been seen."""
        while self.length and self.string[self.length] != char:
            self.length = self._failure[self.length - 1]
        self.length += self.string[self.length] == char
        return self.length == len(self.string)


class StopStrings:
    """Finds the stop string that is completed first; among those the longest.

    Args:
        strings: Stop strings, each of any length.

    Raises:
        ConfigError: A stop string is empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._patterns = [_Pattern(string) for string in strings]
        if any(not pattern.string for pattern in self._patterns):
            raise ConfigError("a stop string is empty; give at least one character")
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched

    def push(self, text: str) -> StopMatch:
        """Consume text; after a match everything is swallowed."""
        if self._matched is not None:
            return StopMatch("", self._matched)
        if not self._patterns:
            return StopMatch(text, None)
        pending = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            # no early exit: every pattern has to see the character
            found = [pattern.string for pattern in self._patterns if pattern.push(char)]
            if found:
                self._matched = max(found, key=len)
                self._held = ""
                return StopMatch(pending[: position - len(self._matched)], self._matched)
        cut = len(pending) - max(pattern.length for pattern in self._patterns)
        self._held = pending[cut:]
        return StopMatch(pending[:cut], None)

    def flush(self) -> str:
        """Return the held text at the end of a stretch of text; matching starts afresh."""
        for pattern in self._patterns:
            pattern.length = 0
        held, self._held = self._held, ""
        return held
