"""Drafters with a will of their own, and engines that use them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from moonlet.engine import Engine
from moonlet.engine.request import Sequence
from moonlet.engine.speculative import SpeculativeConfig

Guess = Callable[[Sequence, int], SequenceOf[int]]
"""Maps a sequence and a limit to drafts."""


class GuessDrafter:
    """Proposes what a function says."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess

    def observe(self, sequence: Sequence) -> bool:
        return True

    def propose(self, sequence: Sequence, limit: int) -> SequenceOf[int]:
        return self._guess(sequence, limit)

    def forget(self, sequence: Sequence, *, has_ended_well: bool) -> None:
        pass

    def tracked(self) -> set[str]:
        return set()


def oracle(truth: Mapping[str, SequenceOf[int]]) -> Guess:
    """Always right: the ids that plain decoding gave; silent about other requests."""

    def guess(sequence: Sequence, limit: int) -> SequenceOf[int]:
        start = len(sequence.output_ids)
        return truth.get(sequence.request_id, ())[start : start + limit]

    return guess


def adversary(truth: Mapping[str, SequenceOf[int]], vocab_size: int) -> Guess:
    """Always wrong."""

    def guess(sequence: Sequence, limit: int) -> SequenceOf[int]:
        return [(id + 1) % vocab_size for id in oracle(truth)(sequence, limit)]

    return guess


def corrupted(truth: Mapping[str, SequenceOf[int]], vocab_size: int, seed: int = 0) -> Guess:
    """Right up to a random place, of another length every time; sometimes no drafts at all."""
    generator = random.Random(seed)

    def guess(sequence: Sequence, limit: int) -> SequenceOf[int]:
        ids = list(oracle(truth)(sequence, generator.randint(0, limit)))
        if ids and generator.random() < 0.7:
            place = generator.randrange(len(ids))
            ids[place] = (ids[place] + 1 + generator.randrange(vocab_size - 1)) % vocab_size
        return ids

    return guess


def unlike(truth: Mapping[str, SequenceOf[int]], vocab_size: int, seed: int = 0) -> Guess:
    """Random ids."""
    generator = random.Random(seed)

    def guess(sequence: Sequence, limit: int) -> SequenceOf[int]:
        return [generator.randrange(vocab_size) for _ in range(limit)]

    return guess


def speculate(k: int, *, adaptive: bool = False, **knobs: object) -> SpeculativeConfig:
    """A config of n-gram drafting, without control of lengths."""
    raw = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1, **knobs}
    return SpeculativeConfig.from_dict(raw | {"adaptive": adaptive})


def draft_with(engine: Engine, guess: Guess) -> None:
    """Replace the drafter of an idle engine."""
    assert engine._speculation is not None
    engine._speculation._drafter = GuessDrafter(guess)
