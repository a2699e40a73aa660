"""The vocabulary of the small model: corpus and ranks.

A small model copies a word exactly only if the word has the same few, often seen tokens wherever it
stands: after a space in a request, after a quote in a declaration, after an underscore in a tool
name, alone in an argument. Plain BPE breaks that, since it merges the leading mark into the first
syllable. So the ranks are made in two steps:

1. BPE on letter runs without their leading mark, with tempered counts: a few hundred syllables,
   each of them in many words, instead of whole frequent words and rare leftovers;
2. whole pre-token pieces, by frequency: the words of the markup and of the messages that every
   prompt starts with, and punctuation. Never a word of the open classes (nouns, verbs, names,
   parameter names), and with a leading mark only words long enough that no other word begins with
   them: a token `` you`` would split ``young`` differently after a space and after a quote.

The result is an ordinary rank file: an encoder looks a whole piece up first and merges by rank
otherwise. Digits are never merged, since column arithmetic needs one token per digit.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import regex

from moonlet.chat.bpe import train_bpe
from moonlet.chat.render import render
from moonlet.chat.segments import Segment
from moonlet.chat.vocabulary import PATTERN
from moonlet.train.tasks import words
from moonlet.train.tasks.mixture import make_sample
from moonlet.train.tasks.sample import Sample
from moonlet.train.tasks.values import CONCEPTS, NEUTRAL_NAMES

NUM_RANKS = 640
MIN_WHOLE_LETTERS = 5
# a whole piece stands in at least this share of the conversations
MIN_WHOLE_SHARE = 0.02
CORPUS_SEED = 7
DEFAULT_NUM_SAMPLES = 6000
_OPEN_LISTS = (
    "CITIES", "COUNTRIES", "NAMES", "SURNAMES", "NOUNS", "ATTRIBUTES", "ADJECTIVES", "COLORS",
    "LANGUAGES", "CURRENCIES", "UNITS", "CONDITIONS", "SIZES", "DEVICES", "ROOMS", "TICKERS",
    "GET_VERBS", "ACT_VERBS",
)  # fmt: skip
# attributes of the markup, which stand in every message
_MARKUP = frozenset((" role", " tool", " index", " type"))


def render_sample(sample: Sample) -> list[Segment]:
    """Render a training conversation; supervised segments are marked ``generated``."""
    return render(
        sample.messages,
        sample.tools,
        thinking=sample.thinking,
        thinking_effort=sample.thinking_effort,
        add_generation_prompt=False,
    )


def train_ranks(
    num_ranks: int = NUM_RANKS,
    num_samples: int = DEFAULT_NUM_SAMPLES,
    seed: int = CORPUS_SEED,
) -> dict[bytes, int]:
    """Make the ranks of the small model's tokenizer, for ``chat.bpe.tokenizer_files``.

    Args:
        num_ranks: Size of the vocabulary without control tokens.
        num_samples: Training conversations to count.
        seed: Seed of the conversations.

    Returns:
        Token bytes to rank; ranks 0..255 are the single bytes in order, then come syllables, then
        whole pieces.
    """
    total: Counter[str] = Counter()
    conversations: Counter[str] = Counter()
    for index in range(num_samples):
        pieces = _count_pieces(render_sample(make_sample(seed, index)))
        total += pieces
        conversations.update(pieces.keys())
    open_words = _open_words()
    wholes = [
        piece
        for piece, count in sorted(conversations.items(), key=lambda item: (-item[1], item[0]))
        if count >= num_samples * MIN_WHOLE_SHARE
        and len(piece.encode()) > 1
        and _may_be_whole(piece, open_words)
    ][: (num_ranks - 256) // 2]
    for piece in wholes:
        del total[piece]
    syllables = train_bpe(_letter_runs(total), num_ranks)
    tokens = [token for token in syllables if token not in {w.encode() for w in wholes}]
    tokens = tokens[: num_ranks - len(wholes)] + [piece.encode() for piece in wholes]
    return {token: rank for rank, token in enumerate(tokens)}


def _count_pieces(segments: Iterable[Segment]) -> Counter[str]:
    pattern = regex.compile(f"(?V1){PATTERN}")
    texts = Counter(s.text for s in segments if not s.allow_special)
    pieces: Counter[str] = Counter()
    for text, count in texts.items():
        for piece in pattern.findall(text):
            pieces[piece] += count
    return pieces


def _letter_runs(pieces: Counter[str]) -> Iterator[str]:
    """Yield every piece without its leading mark, as often as the square root of its count."""
    for piece, count in pieces.items():
        run = piece if piece[:1].isalpha() else piece[1:]
        if run[:1].isalpha():
            for _ in range(math.isqrt(count)):
                yield run


def _open_words() -> frozenset[str]:
    """Return the words, in lower case, whose leading mark must stay a token of its own."""
    entries = [entry for name in _OPEN_LISTS for entry in getattr(words, name)]
    entries += [name for concept in CONCEPTS for name in concept.names]
    entries += [name for names in NEUTRAL_NAMES.values() for name in names]
    entries += ["true", "false"]
    return frozenset(word for entry in entries for word in regex.findall(r"\p{L}+", entry.lower()))


def _may_be_whole(piece: str, open_words: frozenset[str]) -> bool:
    if regex.search(r"\p{N}", piece):
        return False
    if piece in _MARKUP or not regex.search(r"\p{L}", piece):
        return True
    word = piece if piece[:1].isalpha() else piece[1:]
    return len(word) >= MIN_WHOLE_LETTERS and word.lower() not in open_words
