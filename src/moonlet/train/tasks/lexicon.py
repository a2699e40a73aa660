"""The two vocabularies of the tasks (training and held out) and the hash split behind them.

Everything that a generator can invent (operand pairs, pseudo-words, whole prompts) belongs to
exactly one side, decided by a CRC of its text, so that the evaluation can be drawn without a list
of what training has seen.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from moonlet.train.tasks import words, words_heldout

HELDOUT_ONE_IN = 16
_ONSETS = [
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "qu",
    "r",
    "s",
    "sh",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "y",
    "z",
]
_NUCLEI = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ee", "oo", "ou", "ia"]
_CODAS = [*([""] * 9), "n", "r", "l", "s", "m", "x", "t", "k", "nd"]


def is_heldout(kind: str, text: str) -> bool:
    """Return whether the item ``text`` of class ``kind`` belongs to the held-out side."""
    return zlib.crc32(f"{kind}:{text.lower()}".encode()) % HELDOUT_ONE_IN == 0


def is_heldout_pair(a: int, b: int) -> bool:
    """Return whether the unordered operand pair belongs to the held-out side."""
    return is_heldout("pair", f"{min(a, b)},{max(a, b)}")


@dataclass(frozen=True, slots=True)
class Lexicon:
    """One side of the split: word lists plus the filter for invented items.

    Attributes:
        heldout: Whether this is the evaluation side.
        words: The module that holds the word lists of this side.
        splice_share: Share of invented words that join the head of one listed word to the tail of
            another instead of syllables.
        invented_share: Share of nouns that are invented.
        odd_share: How often tools and requests take odd forms (meaningless names, three
            arguments), 0 for never.
        quoted_share: Share of values of several words that a request quotes where it need not.
    """

    heldout: bool
    words: ModuleType
    splice_share: float = 0.0
    invented_share: float = 0.33
    odd_share: float = 0.15
    quoted_share: float = 0.81

    def allows(self, kind: str, text: str) -> bool:
        """Return whether an invented item may be used on this side."""
        return is_heldout(kind, text) == self.heldout

    def pick(self, rng: random.Random, name: str) -> str:
        """Draw one entry of the list ``name`` (for example ``"CITIES"``)."""
        options: Sequence[str] = getattr(self.words, name)
        return options[rng.randrange(len(options))]

    def pseudo_word(self, rng: random.Random, syllables: int | None = None) -> str:
        """Invent a lower-case word that belongs to this side."""
        if self.splice_share and syllables is None and rng.random() < self.splice_share:
            return self._spliced_word(rng)
        while True:
            count = syllables or rng.choice((2, 2, 2, 3))
            word = "".join(rng.choice(_ONSETS) + rng.choice(_NUCLEI) for _ in range(count))
            word += rng.choice(_CODAS)
            if len(word) > 2 and self.allows("word", word):
                return word

    def _spliced_word(self, rng: random.Random) -> str:
        """Join the head of one listed word to the tail of another.

        That gives the letter runs of real words in new combinations, which syllables never have.
        """
        while True:
            head, tail = (
                self.pick(rng, rng.choice(("NOUNS", "ATTRIBUTES", "CITIES", "NAMES"))).lower()
                for _ in range(2)
            )
            word = head[: rng.randint(2, 5)] + tail[-rng.randint(2, 5) :]
            if word.isalpha() and self.allows("word", word) and word not in _heldout_words():
                return word

    def noun(self, rng: random.Random) -> str:
        """Draw a noun: a listed or an invented one."""
        if rng.random() < self.invented_share:
            return self.pseudo_word(rng)
        return self.pick(rng, "NOUNS").replace("_", " ")

    def attribute(self, rng: random.Random) -> str:
        """Draw an attribute noun: a listed one, or an invented one in a quarter of the cases."""
        return self.pseudo_word(rng) if rng.random() < 0.25 else self.pick(rng, "ATTRIBUTES")

    def fill(self, rng: random.Random, template: str) -> str:
        """Fill the slots {n} {a} {c} {p} {w} {m} {date} of a phrase template."""
        return template.format(
            n=self.noun(rng),
            a=self.pick(rng, "ADJECTIVES"),
            c=self.city(rng),
            p=self.pick(rng, "NAMES"),
            w=self.pseudo_word(rng),
            m=rng.randint(1, 99),
            date=f"20{rng.randint(20, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        )

    def city(self, rng: random.Random) -> str:
        """Draw a real or an invented city name."""
        if rng.random() < 0.5:
            return self.pick(rng, "CITIES")
        word = self.pseudo_word(rng).capitalize()
        if rng.random() < 0.2:
            word = f"{rng.choice(('New', 'San', 'Port', 'Saint', 'East', 'Lake'))} {word}"
        return word


@cache
def _heldout_words() -> frozenset[str]:
    """Every word of the held-out lists, lower case."""
    lists = (value for value in vars(words_heldout).values() if isinstance(value, tuple))
    texts = (text for entries in lists for text in entries if isinstance(text, str))
    return frozenset(word for text in texts for word in text.lower().replace("_", " ").split())


# the few hundred listed words alone would be recalled instead of copied
TRAIN = Lexicon(
    heldout=False,
    words=words,
    splice_share=0.6,
    invented_share=0.45,
    odd_share=0.25,
    quoted_share=0.65,
)
HELDOUT = Lexicon(heldout=True, words=words_heldout)
