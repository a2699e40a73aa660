"""The vocabulary of the small model: corpus and ranks.

A small model copies names exactly only if a name has the same tokens wherever it stands: after a
space in a request, after a quote in a declaration, after an underscore in a tool name, alone in an
argument. Plain BPE breaks that, since it merges the leading mark into the first syllable. So the
ranks are made in two steps:

1. BPE on letter runs without their leading mark: syllables and word pieces;
2. whole pre-token pieces, by frequency: the words that every prompt holds with their leading space
   (the effort message, the frame, JSON punctuation), but never a word of the open classes (nouns,
   verbs, names, parameter names), whose leading mark stays a token of its own.

The result is an ordinary rank file: an encoder looks a whole piece up first and merges by rank
otherwise. Digits are never merged, since column arithmetic needs one token per digit.
"""

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

NUM_RANKS = 1280
NUM_LETTER_RANKS = 880
CORPUS_SEED = 7
DEFAULT_NUM_SAMPLES = 6000
_OPEN_LISTS = (
    "CITIES", "COUNTRIES", "NAMES", "SURNAMES", "NOUNS", "ATTRIBUTES", "ADJECTIVES", "COLORS",
    "LANGUAGES", "CURRENCIES", "UNITS", "CONDITIONS", "SIZES", "DEVICES", "ROOMS", "TICKERS",
    "GET_VERBS", "ACT_VERBS",
)  # fmt: skip
# in an open class, but also words of the messages that every prompt starts with
_ALWAYS_WHOLE = frozenset(
    f" {word}"
    for word in [
        "message",
        "tool",
        "call",
        "number",
        "index",
        "user",
        "text",
        "type",
        "key",
        "to",
        "channel",
        "include",
        "a",
        "I",
    ]
)


def render_sample(sample: Sample) -> list[Segment]:
    """Render a training conversation; supervised segments are marked ``generated``."""
    return render(
        sample.messages,
        sample.tools,
        thinking=sample.thinking,
        thinking_effort=sample.thinking_effort,
        add_generation_prompt=False,
    )


def corpus(num_samples: int = DEFAULT_NUM_SAMPLES, seed: int = CORPUS_SEED) -> Iterator[Segment]:
    """Yield the segments of ``num_samples`` training conversations."""
    for index in range(num_samples):
        yield from render_sample(make_sample(seed, index))


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
        Token bytes to rank; ranks 0..255 are the single bytes in order.
    """
    pieces = _count_pieces(corpus(num_samples, seed))
    letter_ranks = min(num_ranks, NUM_LETTER_RANKS)
    ranks = train_bpe(_letter_runs(pieces), letter_ranks)
    open_words = _open_words()
    for piece, _ in sorted(pieces.items(), key=lambda item: (-item[1], item[0])):
        if len(ranks) == num_ranks:
            break
        token = piece.encode()
        if token not in ranks and _may_be_whole(piece, open_words):
            ranks[token] = len(ranks)
    return ranks


def _count_pieces(segments: Iterable[Segment]) -> Counter[str]:
    pattern = regex.compile(f"(?V1){PATTERN}")
    texts = Counter(s.text for s in segments if not s.allow_special)
    pieces: Counter[str] = Counter()
    for text, count in texts.items():
        for piece in pattern.findall(text):
            pieces[piece] += count
    return pieces


def _letter_runs(pieces: Counter[str]) -> Iterator[str]:
    """Yield every piece without its leading mark, as often as it occurs."""
    for piece, count in pieces.items():
        run = piece if piece[:1].isalpha() else piece[1:]
        if run[:1].isalpha():
            for _ in range(count):
                yield run


def _open_words() -> frozenset[str]:
    """Return the words, in lower case, whose leading mark must stay a token of its own."""
    entries = [entry for name in _OPEN_LISTS for entry in getattr(words, name)]
    entries += [name for concept in CONCEPTS for name in concept.names]
    entries += [name for names in NEUTRAL_NAMES.values() for name in names]
    return frozenset(word for entry in entries for word in regex.findall(r"\p{L}+", entry.lower()))


def _may_be_whole(piece: str, open_words: frozenset[str]) -> bool:
    if regex.search(r"\p{N}", piece):
        return False
    if piece in _ALWAYS_WHOLE or not regex.search(r"\p{L}", piece):
        return True
    if piece[:1].isalpha() or len(piece) == 2:
        return False
    return piece[1:].lower() not in open_words
