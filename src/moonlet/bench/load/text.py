"""Random text of a wanted length, in words or in tokens of a known vocabulary.

Nobody outside a server knows how it counts: lengths are words of plain English unless the caller
has the vocabulary. Words of a vocabulary are tokens that are a space and letters. The
pre-tokenizer cuts before such a space, so a text has as many tokens as words, on top of what the
server's template adds.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from moonlet.chat.tokenizer import Tokenizer
from moonlet.core.errors import ConfigError

__all__ = ["TextSource"]

# fewer would repeat so often that prompts of some length share prefixes
_LEAST_WORDS = 16
_ENGLISH = """
about above after again air all along also always animal another answer any apple around away
back base bank before began below best better between bird black blue boat body book both bring
brother build call came carry change city clear close cold color come common cost country cover
cross dark day deep door down draw dry during each early earth east easy edge end enough even
ever every eye face fact fall family far farm fast father feel field fill final fine fire first
fish five floor fly follow food foot force form found four free friend front full game garden
gave girl give glass gold gone good great green ground group grow half hand happy hard head hear
heart heat help here high hill hold home horse hot hour house idea inch island just keep kind
king knew land large last late laugh lead learn leave left less letter life light line list
listen little live long look love low machine main make many map mark matter mean measure
middle mile milk mind minute money moon more morning most mother mountain mouth move much music
name near need never new next night north note nothing notice number ocean often old once only
open order other over own page paper part pass past pattern people piece place plain plan plane
plant play point pose power press problem produce pull push quick quiet rain ran reach read
ready real red rest river road rock room round rule run said sail same school science sea second
seem sentence serve seven shape ship short show side simple sing sit six size sleep slow small
snow song soon sound south space spell stand star start state stay step still stone stop story
street strong study summer sun sure table tail take talk teach tell ten test thing think three
time today together told took top toward town travel tree true try turn under unit until use
valley very voice walk wall want war warm watch water way week weight west wheel white whole
wind winter wish wonder wood word work world write year yellow yes young
"""


class TextSource:
    """Draws text; the same generator state gives the same text.

    Args:
        directory: Folder of a vocabulary (`moonlet.chat.Tokenizer`); plain words when None.

    Attributes:
        unit: What a length counts: ``words`` or ``tokens``.

    Raises:
        ConfigError: The vocabulary has too few whole words to make text of.
        CheckpointError: There is no vocabulary in the folder, or it is malformed.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.unit = "words" if directory is None else "tokens"
        self._between = " " if directory is None else ""
        self._words = tuple(_ENGLISH.split()) if directory is None else _token_words(directory)

    def text(self, rng: random.Random, length: int) -> str:
        """Return random text of so many words or tokens."""
        return self._between.join(rng.choices(self._words, k=length))


def _token_words(directory: Path) -> tuple[str, ...]:
    tokenizer = Tokenizer.from_dir(directory)
    found = [
        text
        for token_id in range(tokenizer.num_ranks)
        if re.fullmatch(" [a-z]+", text := tokenizer.name(token_id))
        and tokenizer.encode(text) == [token_id]
    ]
    if len(found) < _LEAST_WORDS:
        raise ConfigError(
            f"the vocabulary in {directory} has {len(found)} whole words, too few for text of a "
            "known number of tokens; leave --tokenizer out and lengths count words"
        )
    return tuple(found)
