"""The phases of the mixture: what changes with progress, and that nothing else does."""

import random

from moonlet.train.tasks import words_heldout
from moonlet.train.tasks.lexicon import TRAIN, TRAIN_DIVERSE
from moonlet.train.tasks.mixture import DIVERSE_FROM, DRILL, NATURAL_FROM, make_sample
from moonlet.train.tasks.tokenizer_corpus import CORPUS_PROGRESS


def copies(progress: float, count: int = 300) -> list[str]:
    return [
        turn.messages[-1]["content"]
        for index in range(count)
        for turn in make_sample(3, index, progress).turns
        if turn.task == "copy"
    ]


def test_long_copies_belong_to_their_phase() -> None:
    inside, outside = copies(DRILL[0]), copies(DRILL[0] - 0.01)
    assert len(inside) > 3 * len(outside)
    assert max(map(len, inside)) > max(map(len, outside))
    assert len(copies(DRILL[1])) < len(inside) / 3


def test_samples_before_the_phases_are_all_the_same() -> None:
    for index in range(50):
        early = make_sample(3, index, CORPUS_PROGRESS).messages
        assert make_sample(3, index, DRILL[0] - 1e-9).messages == early


def test_diverse_words_are_new_and_never_held_out() -> None:
    rng = random.Random(0)
    plain = {TRAIN.pseudo_word(rng) for _ in range(2000)}
    diverse = {TRAIN_DIVERSE.pseudo_word(rng) for _ in range(2000)}
    assert len(diverse - plain) > 1000
    held_out = {word.lower() for word in words_heldout.NOUNS}
    assert not diverse & held_out
    assert DRILL[0] < DIVERSE_FROM < NATURAL_FROM
