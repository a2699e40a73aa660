"""The file of a replay: requests with the times at which they were sent.

One JSON object a line with two fields, others are ignored: ``timestamp``, seconds from any start,
and ``body``, the request as it was sent. A body with ``messages`` goes to ``/chat/completions``,
one with ``prompt`` to ``/completions``. The lines may be in any order.
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from moonlet.core.errors import ConfigError

__all__ = ["Recorded", "read_log"]


class Recorded(NamedTuple):
    """One request of a log: seconds after the first one, and its body."""

    at_s: float
    body: dict[str, Any]


def read_log(path: Path, speed: float = 1.0) -> list[Recorded]:
    """Read a log in the order of its timestamps; equal ones keep the order of the file.

    Args:
        path: File of JSON lines.
        speed: Times between requests are divided by it.

    Raises:
        ConfigError: The file cannot be read, is empty, or a line is not a record; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--replay {path} cannot be read: {error}") from error
    records = [_record(path, i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise ConfigError(f"--replay {path} has no requests; write one JSON object a line")
    records.sort(key=lambda record: record.at_s)
    first = records[0].at_s
    return [Recorded((at_s - first) / speed, body) for at_s, body in records]


def _record(path: Path, number: int, line: str) -> Recorded:
    try:
        record = json.loads(line)
        at_s, body = record["timestamp"], record["body"]
    except (ValueError, LookupError, TypeError) as error:
        raise _bad(path, number, 'want {"timestamp": seconds, "body": {...}}') from error
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not isfinite(at_s):
        raise _bad(path, number, "timestamp must be a number of seconds")
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise _bad(path, number, "body must be an object with messages or prompt")
    return Recorded(float(at_s), body)


def _bad(path: Path, number: int, words: str) -> ConfigError:
    return ConfigError(f"--replay {path}, line {number} is no request; {words}")
