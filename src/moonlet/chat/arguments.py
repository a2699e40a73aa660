"""The arguments of one tool call, as JSON text that can be streamed (chat-protocol.md 4.4).

Every method returns the piece of JSON text that it adds; the pieces concatenate to
`CallBuilder.arguments`. String values go out as they arrive, other values when they close.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

__all__ = ["CallBuilder", "dump_json", "load_json"]

_SURROGATE = re.compile("[\ud800-\udfff]")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is out of range")
    return value


def load_json(text: str) -> Any:
    """Parse strict JSON: no NaN or Infinity, no number that overflows to infinity.

    Raises:
        ValueError: The text is not JSON, or Python cannot represent it (depth, digits, range).
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def dump_json(value: Any) -> str:
    """Serialise as the renderer does: `", "` and `": "`, non-ASCII kept (section 3.4).

    A lone surrogate, which JSON text can spell but UTF-8 cannot carry, stays escaped.

    Raises:
        ValueError: The value is nested too deeply.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("value is nested too deeply") from None
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


class CallBuilder:
    """Collects one call; values that must be ignored are consumed without effect.

    Args:
        name: Tool name.
        flags: Receives the names of irregularities; modified in place.
    """

    def __init__(self, name: str, flags: set[str]) -> None:
        self.name = name
        self._flags = flags
        self._pieces: list[str] = []
        self._num_arguments = 0
        self._has_json = False
        # kind of the open value: None, "string", "typed", "json" or "ignored"
        self._kind: str | None = None
        self._raw: list[str] = []

    @property
    def arguments(self) -> str:
        """The JSON text so far."""
        return "".join(self._pieces)

    def open_argument(self, key: str, type_name: str) -> str:
        """Begin a value; after a json block it is ignored."""
        if self._has_json:
            self._kind = "ignored"
            return ""
        self._kind = "string" if type_name == "string" else "typed"
        lead = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        quote = '"' if self._kind == "string" else ""
        return self._add(f"{lead}{dump_json(key)}: {quote}")

    def open_json(self) -> str:
        """Begin a json block; after any argument or an earlier block it is ignored."""
        if self._num_arguments or self._has_json:
            self._kind = "ignored"
        else:
            self._flags.add("json_block")
            self._has_json = True
            self._kind = "json"
        return ""

    def value_text(self, text: str) -> str:
        """Add raw text to the open value."""
        if self._kind == "string":
            return self._add(dump_json(text)[1:-1])
        if self._kind != "ignored":
            self._raw.append(text)
        return ""

    def close_value(self) -> str:
        """Complete the open value."""
        kind, raw = self._kind, "".join(self._raw)
        self._kind = None
        self._raw.clear()
        if kind == "string":
            return self._add('"')
        if kind == "typed":
            return self._add(self._typed(raw))
        return self._add(self._block(raw)) if kind == "json" else ""

    def close(self) -> str:
        """Complete the call."""
        if self._num_arguments:
            return self._add("}")
        return "" if self._pieces else self._add("{}")

    def _add(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _typed(self, raw: str) -> str:
        try:
            return dump_json(load_json(raw))
        except ValueError:
            self._flags.add("bad_typed_value")
            return dump_json(raw)

    def _block(self, raw: str) -> str:
        try:
            value = load_json(raw)
            if isinstance(value, dict):
                return dump_json(value)
        except ValueError:
            # malformed JSON is passed on below like JSON that is no object
            pass
        self._flags.add("bad_json_block")
        return "" if raw.isspace() else raw
