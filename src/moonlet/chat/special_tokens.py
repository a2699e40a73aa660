"""Names and ids of the 256 control tokens behind the merge ranks (chat-protocol.md section 2.2).

K3 places the control tokens directly after its N merge ranks, so a name is known by its offset
from N. A checkpoint may give its own names in ``tokenizer_config.json``; ids always come from the
table in use, never from constants, so vocabularies of any size work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonlet.core.errors import CheckpointError

__all__ = [
    "ABSENT",
    "K3_OFFSETS",
    "NUM_RESERVED",
    "STOP_NAMES",
    "XTML_NAMES",
    "SpecialTable",
    "XTMLIds",
    "k3_table",
    "read_table",
]

NUM_RESERVED = 256
ABSENT = -1

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"

K3_OFFSETS: Mapping[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: END_OF_MSG,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Offset from the first control id to the name; the other offsets hold reserved names."""

XTML_NAMES = (OPEN, CLOSE, SEP, END_OF_MSG)
"""The names without which a vocabulary cannot carry XTML chats."""

# <|im_end|> is the end of a message in the older table that Kimi-Linear checkpoints carry
STOP_NAMES = (END_OF_MSG, "[EOS]", "[EOT]", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class XTMLIds:
    """Ids of the control tokens that code asks for; ``ABSENT`` (-1) where the table lacks one."""

    open: int
    close: int
    sep: int
    end_of_msg: int
    eos: int
    eot: int
    bos: int
    media_begin: int
    media_content: int
    media_end: int
    media_pad: int
    pad: int

    @classmethod
    def from_names(cls, ids: Mapping[str, int]) -> XTMLIds:
        """Look every id up in a name table."""
        return cls(
            open=ids.get(OPEN, ABSENT),
            close=ids.get(CLOSE, ABSENT),
            sep=ids.get(SEP, ABSENT),
            end_of_msg=ids.get(END_OF_MSG, ABSENT),
            eos=ids.get("[EOS]", ABSENT),
            eot=ids.get("[EOT]", ABSENT),
            bos=ids.get("[BOS]", ABSENT),
            media_begin=ids.get("<|media_begin|>", ABSENT),
            media_content=ids.get("<|media_content|>", ABSENT),
            media_end=ids.get("<|media_end|>", ABSENT),
            media_pad=ids.get("<|media_pad|>", ABSENT),
            pad=ids.get("[PAD]", ABSENT),
        )


@dataclass(frozen=True, slots=True)
class SpecialTable:
    """Control tokens of one vocabulary.

    Attributes:
        ids: Name to id.
        kept: Names that stay in the text when special tokens are skipped (flagged
            ``special: false``; the three markup tokens of XTML).
    """

    ids: Mapping[str, int]
    kept: frozenset[str]


def reserved_name(token_id: int) -> str:
    """Return the spelling of an unnamed control id."""
    return f"<|reserved_token_{token_id}|>"


def k3_table(num_ranks: int) -> SpecialTable:
    """Return K3's control tokens for a vocabulary of ``num_ranks`` merge ranks."""
    ids = {
        K3_OFFSETS.get(offset, reserved_name(num_ranks + offset)): num_ranks + offset
        for offset in range(NUM_RESERVED)
    }
    return SpecialTable(ids, frozenset((OPEN, CLOSE, SEP)))


def read_table(config: Mapping[str, Any], num_ranks: int) -> SpecialTable:
    """Read the control tokens from a ``tokenizer_config.json``.

    The first ``NUM_RESERVED`` ids that the file does not name get reserved names; without any
    ``added_tokens_decoder`` the table of K3 is used.

    Args:
        config: The parsed file.
        num_ranks: Number of merge ranks; control ids start there.

    Returns:
        The table, at least ``NUM_RESERVED`` entries.

    Raises:
        CheckpointError: An id or name is malformed, repeated, or inside the merge ranks.
    """
    decoder = config.get("added_tokens_decoder")
    if not decoder:
        return k3_table(num_ranks)
    if not isinstance(decoder, Mapping):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder is not an object")
    names: dict[int, str] = {}
    kept: set[str] = set()
    for key, entry in decoder.items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not (isinstance(key, str) and key.isdecimal() and isinstance(content, str) and content):
            raise CheckpointError(f"tokenizer_config.json: malformed added token {key!r}: {entry}")
        if int(key) < num_ranks:
            raise CheckpointError(
                f"tokenizer_config.json: control id {key} ({content!r}) lies inside the "
                f"{num_ranks} merge ranks; the file belongs to another vocabulary"
            )
        names[int(key)] = content
        if not entry.get("special", True):
            kept.add(content)
    ids: dict[str, int] = {}
    for token_id in sorted({*range(num_ranks, num_ranks + NUM_RESERVED), *names}):
        name = names.get(token_id, reserved_name(token_id))
        if name in ids:
            raise CheckpointError(
                f"tokenizer_config.json: control name {name!r} has two ids, "
                f"{ids[name]} and {token_id}"
            )
        ids[name] = token_id
    return SpecialTable(ids, frozenset(kept))
