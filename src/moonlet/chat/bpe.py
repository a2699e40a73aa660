"""A byte-level BPE trainer for small vocabularies in K3's file format (chat-protocol.md 2.6).

Text is cut by K3's pre-tokenizer; the most frequent adjacent pair of tokens becomes the next
rank, ties going to the pair whose bytes sort first. Each merge touches only the pieces that hold
the pair. The result is read back by the same tokenizer as the published vocabularies.
"""

from __future__ import annotations

import heapq
import json
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import regex

from moonlet.chat.segments import Segment
from moonlet.chat.special_tokens import k3_table
from moonlet.chat.tokenizer import split_long_text
from moonlet.chat.vocabulary import PATTERN, write_ranks
from moonlet.core.errors import ConfigError

__all__ = ["tokenizer_config", "tokenizer_files", "train_bpe"]


def train_bpe(
    texts: Iterable[str | Segment],
    num_ranks: int,
    *,
    forbid_digit_merges: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[bytes, int]:
    """Train merge ranks on a corpus.

    Args:
        texts: Strings, or segments of rendered chats; control segments are left out, since their
            tokens are not learned.
        num_ranks: Size of the vocabulary without control tokens, at least 256.
        forbid_digit_merges: Whether every digit stays a token of its own, as arithmetic by a
            small model needs.
        on_progress: Called with (ranks so far, ``num_ranks``) after every merge.

    Returns:
        Token bytes to rank; ranks 0..255 are the single bytes in order.

    Raises:
        ConfigError: ``num_ranks`` is below 256, or the corpus has too few different pairs.
    """
    if num_ranks < 256:
        raise ConfigError(f"num_ranks is {num_ranks}; the single bytes alone need 256")
    state = _MergeState(_count_pieces(texts, forbid_digit_merges))
    while len(state.ranks) < num_ranks:
        if not state.merge_best():
            raise ConfigError(
                f"the corpus gives only {len(state.ranks)} of {num_ranks} ranks; "
                "add text or lower num_ranks"
            )
        if on_progress is not None:
            on_progress(len(state.ranks), num_ranks)
    return state.ranks


def tokenizer_config(num_ranks: int) -> dict[str, Any]:
    """Return a ``tokenizer_config.json`` with K3's 256 control tokens from ``num_ranks`` on."""
    table = k3_table(num_ranks)
    decoder = {
        str(token_id): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in table.kept,
        }
        for name, token_id in table.ids.items()
    }
    return {
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }


def tokenizer_files(ranks: Mapping[bytes, int]) -> dict[str, bytes]:
    """Return the tokenizer files of a model directory, file name to bytes."""
    config = json.dumps(tokenizer_config(len(ranks)), indent=1, ensure_ascii=False)
    return {
        "tiktoken.model": write_ranks(ranks),
        "tokenizer_config.json": config.encode() + b"\n",
    }


def _count_pieces(texts: Iterable[str | Segment], split_digits: bool) -> Counter[bytes]:
    """Count the distinct pre-token pieces of a corpus."""
    pattern = regex.compile(f"(?V1){PATTERN}")
    counts: Counter[str] = Counter()
    for text in texts:
        if isinstance(text, Segment):
            if text.allow_special:
                continue
            text = text.text
        for block in split_long_text(text):
            counts.update(pattern.findall(block))
    pieces: Counter[bytes] = Counter()
    for piece, count in counts.items():
        # number characters only occur in pieces that hold nothing else
        parts = piece if split_digits and regex.fullmatch(r"\p{N}+", piece) else (piece,)
        for part in parts:
            pieces[part.encode("utf-8", "replace")] += count
    return pieces


class _MergeState:
    """Pieces as token sequences, with pair counts kept up to date merge by merge.

    A pair is keyed by its joined bytes, as the encoder looks it up: every way to split a token in
    two counts for, and merges into, the same rank.
    """

    def __init__(self, pieces: Mapping[bytes, int]) -> None:
        self.ranks = {bytes((value,)): value for value in range(256)}
        self._words = [[piece[i : i + 1] for i in range(len(piece))] for piece in pieces]
        self._word_counts = list(pieces.values())
        self._counts: defaultdict[bytes, int] = defaultdict(int)
        # a word stays listed under a pair it has lost; merging skips it then
        self._words_of: defaultdict[bytes, set[int]] = defaultdict(set)
        for index, word in enumerate(self._words):
            for joined in _joined_pairs(word):
                self._counts[joined] += self._word_counts[index]
                self._words_of[joined].add(index)
        self._heap = [(-count, joined) for joined, count in self._counts.items()]
        heapq.heapify(self._heap)

    def merge_best(self) -> bool:
        """Turn the most frequent pair into a token; return False when no pair is left."""
        while self._heap:
            negative_count, joined = heapq.heappop(self._heap)
            count = self._counts.get(joined, 0)
            # every change of a count pushed a fresh entry, so other entries are stale
            if count > 0 and count == -negative_count:
                self.ranks.setdefault(joined, len(self.ranks))
                self._merge(joined)
                return True
        return False

    def _merge(self, joined: bytes) -> None:
        changed: set[bytes] = set()
        for index in self._words_of.pop(joined):
            word, count = self._words[index], self._word_counts[index]
            merged = _merge_word(word, joined)
            if len(merged) == len(word):
                continue
            for lost in _joined_pairs(word):
                self._counts[lost] -= count
                changed.add(lost)
            for gained in _joined_pairs(merged):
                self._counts[gained] += count
                self._words_of[gained].add(index)
                changed.add(gained)
            self._words[index] = merged
        for pair in changed:
            if self._counts[pair] > 0:
                heapq.heappush(self._heap, (-self._counts[pair], pair))


def _joined_pairs(word: list[bytes]) -> Iterator[bytes]:
    return map(operator.add, word, word[1:])


def _merge_word(word: list[bytes], joined: bytes) -> list[bytes]:
    """Replace every adjacent pair that joins to the given bytes, left to right."""
    merged: list[bytes] = []
    index = 0
    while index < len(word):
        if index + 1 < len(word) and word[index] + word[index + 1] == joined:
            merged.append(joined)
            index += 2
        else:
            merged.append(word[index])
            index += 1
    return merged
