"""Text to token ids and back (chat-protocol.md section 2).

The merges are tiktoken's; here are the rules around them: control names are recognised only
where the caller allows it, every segment is encoded alone, very long text is cut exactly as the
official tokenizer cuts it, and ids become text incrementally without broken characters.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import tiktoken

from moonlet.chat.segments import Segment
from moonlet.chat.special_tokens import (
    STOP_NAMES,
    XTML_NAMES,
    SpecialTable,
    XTMLIds,
    k3_table,
    read_table,
)
from moonlet.chat.vocabulary import PATTERN, read_hf_ranks, read_json, read_ranks
from moonlet.core.errors import CheckpointError, RequestError

__all__ = ["StreamDecoder", "Tokenizer", "split_long_text"]

MAX_BLOCK_CHARS = 400_000
MAX_RUN_CHARS = 25_000

# re's \s on str is str.isspace, which is the rule of the official tokenizer
_RUNS = re.compile(r"\s+|\S+")


def split_long_text(text: str) -> Iterator[str]:
    """Cut text into the substrings that are encoded separately (section 2.3).

    Blocks of 400,000 code points; inside a block a run of white space, or of anything else, is
    cut before every 25,001st character. Concatenating the pieces gives the text.
    """
    for start in range(0, len(text), MAX_BLOCK_CHARS):
        block = text[start : start + MAX_BLOCK_CHARS]
        if len(block) <= MAX_RUN_CHARS:
            yield block
            continue
        begin = 0
        for run in _RUNS.finditer(block):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield block[begin:cut]
                begin = cut
        yield block[begin:]


class StreamDecoder:
    """Turns ids into text one at a time, never showing half a character.

    An incomplete UTF-8 tail is held until its bytes arrive; a tail that a control token or the
    end interrupts becomes U+FFFD (section 2.5). State belongs to one stream.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Add one id and return the text that became certain, possibly empty.

        Raises:
            RequestError: The id is outside the vocabulary.
        """
        tokenizer = self._tokenizer
        if not tokenizer.is_special(token_id):
            return self._utf8.decode(tokenizer.token_bytes(token_id))
        tail = self.flush()
        if self._skip_special and tokenizer.is_skippable(token_id):
            return tail
        return tail + tokenizer.name(token_id)

    def flush(self) -> str:
        """End the text: return a held tail as U+FFFD, and start afresh."""
        tail = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return tail


class Tokenizer:
    """A vocabulary: merge ranks, control names, and the encoding rules of K3.

    Args:
        ranks: Token bytes to rank; ranks are 0..N-1 and hold all 256 single bytes.
        special: Control name to id (ids from N on), or a table with flags; K3's table at N when
            None.
        pattern: Pre-tokenizer in Rust ``fancy-regex`` syntax.

    Raises:
        CheckpointError: Ranks have gaps or lack a byte, or control ids overlap them.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special: SpecialTable | Mapping[str, int] | None = None,
        pattern: str = PATTERN,
    ) -> None:
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise CheckpointError(f"merge ranks are not 0..{len(ranks) - 1}, each once")
        missing = [value for value in range(256) if bytes((value,)) not in ranks]
        if missing:
            raise CheckpointError(f"merge ranks lack the single bytes {missing}")
        if special is None:
            special = k3_table(len(ranks))
        elif not isinstance(special, SpecialTable):
            special = SpecialTable(dict(special), k3_table(0).kept)
        ids = dict(special.ids)
        if len(set(ids.values())) != len(ids) or any(i < len(ranks) for i in ids.values()):
            raise CheckpointError("control ids repeat, or overlap the merge ranks")
        self._bytes: list[bytes] = [b""] * len(ranks)
        for token, rank in ranks.items():
            self._bytes[rank] = token
        self._ids = ids
        self._names = {token_id: name for name, token_id in ids.items()}
        self._kept = special.kept
        self._encoding = tiktoken.Encoding(
            "moonlet", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=ids
        )
        self.special_ids = XTMLIds.from_names(ids)
        self.stop_ids = frozenset(ids[name] for name in STOP_NAMES if name in ids)
        self.vocab_size = max(len(ranks), max(ids.values(), default=-1) + 1)

    @classmethod
    def from_dir(cls, directory: Path | str) -> Tokenizer:
        """Load the vocabulary of a model directory.

        Reads ``tiktoken.model`` (else ``tokenizer.json``) and the control names of
        ``tokenizer_config.json`` where present.

        Raises:
            CheckpointError: No vocabulary is there, or a file is malformed.
        """
        directory = Path(directory)
        if (directory / "tiktoken.model").is_file():
            ranks = read_ranks(directory / "tiktoken.model")
        elif (directory / "tokenizer.json").is_file():
            ranks = read_hf_ranks(directory / "tokenizer.json")
        else:
            raise CheckpointError(
                f"no vocabulary in {directory}; want tiktoken.model or tokenizer.json"
            )
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        return cls(ranks, read_table(config, len(ranks)))

    @property
    def num_ranks(self) -> int:
        """Number of ordinary tokens; control ids start here."""
        return len(self._bytes)

    def missing_xtml_names(self) -> list[str]:
        """Return the control names that chats need and this vocabulary lacks."""
        return [name for name in XTML_NAMES if name not in self._ids]

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Encode text to ids.

        Args:
            text: Any string; lone surrogates become U+FFFD.
            allow_special: Turn control names into control ids. Leave False for anything that a
                user, a tool or a model wrote.

        Returns:
            Ids; with ``allow_special`` False every one is below ``num_ranks``.
        """
        if allow_special and text in self._ids:
            return [self._ids[text]]
        ids: list[int] = []
        for piece in split_long_text(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all", disallowed_special=())
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Encode each segment alone and concatenate the ids."""
        ids: list[int] = []
        for segment in segments:
            ids += self.encode(segment.text, segment.allow_special)
        return ids

    def encode_with_mask(self, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
        """Encode segments as ``encode_segments`` does, with the training mask.

        Returns:
            Ids, and for each id whether the model writes it itself.
        """
        ids: list[int] = []
        mask: list[bool] = []
        for segment in segments:
            piece = self.encode(segment.text, segment.allow_special)
            ids += piece
            mask += [segment.generated] * len(piece)
        return ids, mask

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Decode ids for display; control tokens print their names.

        Args:
            ids: Token ids.
            skip_special: Leave out control tokens, except the markup tokens of XTML, which are
                not flagged special.

        Raises:
            RequestError: An id is outside the vocabulary.
        """
        decoder = self.stream_decoder(skip_special=skip_special)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def stream_decoder(self, *, skip_special: bool = False) -> StreamDecoder:
        """Return a fresh incremental decoder."""
        return StreamDecoder(self, skip_special=skip_special)

    def is_special(self, token_id: int) -> bool:
        """Tell whether an id is a control token."""
        return token_id in self._names

    def is_skippable(self, token_id: int) -> bool:
        """Tell whether an id is a control token that "skip special tokens" leaves out."""
        return token_id in self._names and self._names[token_id] not in self._kept

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; for a control token the bytes of its name.

        Raises:
            RequestError: The id is outside the vocabulary.
        """
        if 0 <= token_id < len(self._bytes):
            return self._bytes[token_id]
        name = self._names.get(token_id)
        if name is None:
            raise RequestError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens"
            )
        return name.encode()

    def id(self, name: str) -> int:
        """Return the id of a control name.

        Raises:
            KeyError: The vocabulary has no such control token.
        """
        return self._ids[name]

    def name(self, token_id: int) -> str:
        """Return the name of a control token, or an ordinary token's text.

        Bytes that are no complete character print as U+FFFD.

        Raises:
            RequestError: The id is outside the vocabulary.
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")
