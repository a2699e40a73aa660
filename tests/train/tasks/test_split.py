"""Nothing of the evaluation may occur in training."""

import re

import pytest

from moonlet.train.tasks import words, words_heldout
from moonlet.train.tasks.heldout import FAMILIES, heldout_items
from moonlet.train.tasks.mixture import make_sample

NUM_TRAINING = 20_000
OPEN_LISTS = (
    "CITIES", "COUNTRIES", "NAMES", "SURNAMES", "NOUNS", "ATTRIBUTES", "ADJECTIVES", "COLORS",
    "LANGUAGES", "CURRENCIES", "CONDITIONS", "DEVICES", "ROOMS", "TICKERS", "TASKS", "QUERIES",
)  # fmt: skip
# argument values of closed classes: everybody says them
CLOSED = re.compile(
    r"[\d:.@-]+|\d+ ?[ap]m|today|tomorrow|\w+day|next Friday|May 4|small|medium|large"
)


def _pair(turn):
    numbers = re.findall(r"\d+", turn.user)
    return tuple(sorted(int(n) for n in numbers))


@pytest.fixture(scope="module")
def training():
    seen = {
        "prompts": set(),
        "pairs": set(),
        "names": set(),
        "descriptions": set(),
        "values": set(),
    }
    for index in range(NUM_TRAINING):
        sample = make_sample(1, index, index % 10 / 10)
        for turn in sample.turns:
            seen["prompts"].add(turn.user.lower())
            if turn.task == "arithmetic":
                seen["pairs"].add(_pair(turn))
            for call in turn.expect.calls:
                seen["values"].update(str(v) for v in call.arguments.values())
        for tool in sample.tools or ():
            seen["names"].add(tool["function"]["name"])
            seen["descriptions"].add(tool["function"]["description"])
    return seen


@pytest.fixture(scope="module")
def items():
    return {family: heldout_items(family) for family in FAMILIES}


@pytest.mark.parametrize("name", OPEN_LISTS)
def test_word_lists_are_disjoint(name):
    train = {entry.lower() for entry in getattr(words, name)}
    heldout = {entry.lower() for entry in getattr(words_heldout, name)}
    assert heldout
    assert not train & heldout


def test_prompts_are_unseen(training, items):
    for family in items.values():
        assert len({item.turn.user for item in family}) == 200
        assert not {item.turn.user.lower() for item in family} & training["prompts"]


@pytest.mark.parametrize("family", ["arithmetic", "arithmetic_unseen_phrasing"])
def test_operand_pairs_are_unseen(training, items, family):
    pairs = {_pair(item.turn) for item in items[family]}
    assert len(pairs) > 120
    assert not pairs & training["pairs"]


def test_tools_are_unseen(training, items):
    functions = [tool["function"] for item in items["tools"] for tool in item.tools]
    assert not {f["name"] for f in functions} & training["names"]
    assert not {f["description"] for f in functions} & training["descriptions"]
    assert {len(item.tools) for item in items["tools"]} == {1, 2, 3}


def test_argument_words_are_unseen(training, items):
    values = {
        value
        for item in items["tools"]
        for call in item.expect.calls
        for value in call.arguments.values()
        if isinstance(value, str) and not CLOSED.fullmatch(value)
    }
    assert len(values) > 80
    assert not values & training["values"]


def test_training_and_evaluation_cover_all_argument_types(items):
    types = {
        type(value)
        for item in items["tools"]
        for call in item.expect.calls
        for value in call.arguments.values()
    }
    assert types == {str, int, float, bool}
