"""What changes with progress: the drill phase, the number of tools, the diversity of words."""

import random
from statistics import fmean

from moonlet.train.tasks import words_heldout
from moonlet.train.tasks.lexicon import TRAIN
from moonlet.train.tasks.mixture import DRILL, draw_tools, make_sample
from moonlet.train.tasks.sample import Sample
from moonlet.train.tasks.tools import ask_tool


def draw(progress: float, count: int = 300) -> list[Sample]:
    return [make_sample(3, index, progress) for index in range(count)]


def copies(progress: float) -> list[str]:
    turns = (turn for sample in draw(progress) for turn in sample.turns)
    return [turn.messages[-1]["content"] for turn in turns if turn.task == "copy"]


def test_long_copies_belong_to_their_phase() -> None:
    inside, outside = copies(DRILL[1] - 0.01), copies(DRILL[1])
    assert len(inside) > 3 * len(outside)
    assert max(map(len, inside)) > max(map(len, outside))


def test_tools_become_more() -> None:
    early, late = (
        fmean(len(sample.tools) for sample in draw(progress) if sample.tools)
        for progress in (0.0, 1.0)
    )
    assert early < 1.4 < 1.9 < late


def test_invented_words_are_diverse_and_never_held_out() -> None:
    rng = random.Random(0)
    invented = [TRAIN.pseudo_word(rng) for _ in range(2000)]
    assert len(set(invented)) > 1800
    assert not set(invented) & {word.lower() for word in words_heldout.NOUNS}


def test_a_plan_quotes_only_words_of_request_and_tool() -> None:
    rng = random.Random(0)
    with_words = 0
    for _ in range(300):
        tool = draw_tools(rng, TRAIN, 1.0)[0]
        ask = ask_tool(rng, TRAIN, tool)
        text = f"{tool.name} {tool.description}".lower()
        for word in ask.shared:
            assert word in ask.text
            assert word.lower().removesuffix("s") in text
        with_words += bool(ask.shared)
    assert with_words > 240
