"""Vocabulary files: merge ranks in tiktoken's text format, or a Hugging Face ``tokenizer.json``.

``tiktoken.model`` holds one token a line, base64 of its bytes and its rank (chat-protocol.md
section 2.1). A ``tokenizer.json`` is accepted when it was made from such ranks: byte-level BPE,
ids in merge order, K3's pre-tokenizer (section 2.6).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonlet.core.errors import CheckpointError

__all__ = ["PATTERN", "read_hf_ranks", "read_json", "read_ranks", "write_ranks"]

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_PREFIX}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_PREFIX}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""K3's pre-tokenizer; ``&&`` is class intersection (Rust regex, or ``regex`` with ``(?V1)``)."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a tokenizer file.

    Raises:
        CheckpointError: The file is not UTF-8 JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds {type(value).__name__}; want a JSON object")
    return value


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read merge ranks from a tiktoken file.

    Returns:
        Token bytes to rank, in file order.

    Raises:
        CheckpointError: A line is malformed, names the line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(
                f"{path.name} line {number}: {line[:80]!r} is not 'base64 rank'"
            ) from error
    return ranks


def write_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """Return merge ranks as the bytes of a tiktoken file, sorted by rank."""
    lines = (
        base64.b64encode(token) + b" " + str(rank).encode()
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    return b"\n".join(lines) + b"\n"


def read_hf_ranks(path: Path) -> dict[bytes, int]:
    """Read merge ranks from a Hugging Face ``tokenizer.json``.

    Returns:
        Token bytes to rank, control tokens left out.

    Raises:
        CheckpointError: The file is not byte-level BPE over K3's pre-tokenizer, or its ids do
            not follow the merge order, so that ranks would give other ids than the file.
    """
    data = read_json(path)
    model = data.get("model") or {}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise CheckpointError(f"{path.name}: model.type is {model.get('type')!r}; want BPE")
    if r"\p{Han}" not in json.dumps(data.get("pre_tokenizer")).replace("\\\\", "\\"):
        raise CheckpointError(f"{path.name}: pre_tokenizer is not K3's; give tiktoken.model")
    added = {token.get("content") for token in data.get("added_tokens") or ()}
    byte_of = _byte_alphabet()
    ranks: dict[bytes, int] = {}
    for text, rank in model["vocab"].items():
        if text in added:
            continue
        try:
            ranks[bytes(byte_of[char] for char in text)] = rank
        except KeyError as error:
            raise CheckpointError(f"{path.name}: token {text!r} is not byte-level") from error
    last = -1
    for merge in model.get("merges") or ():
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        rank = model["vocab"].get(left + right, -1)
        if rank < last:
            raise CheckpointError(
                f"{path.name}: merge {left + right!r} has id {rank} after id {last}; "
                "ids do not follow the merge order, give tiktoken.model"
            )
        last = rank
    return ranks


def _byte_alphabet() -> dict[str, int]:
    """Map the printable stand-ins of byte-level BPE back to byte values."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in set(printable)]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(rest)})
    return alphabet
