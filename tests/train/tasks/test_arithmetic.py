import random
import re

import pytest

from moonlet.train.tasks import arithmetic
from moonlet.train.tasks.lexicon import HELDOUT, TRAIN, is_heldout_pair


def _columns(lines):
    """Split off the column lines; each must be a true equation of single digits."""
    results = []
    for line in lines:
        left, right = line.split("=")
        assert re.fullmatch(r"\d[+-]\d([+-]1)?(\+10)?", left)
        assert eval(left) == int(right)
        results.append(int(right))
    return results


def _value(results):
    return sum(digit * 10**i for i, digit in enumerate(results))


@pytest.mark.parametrize("seed", range(4))
def test_addition_columns_compose_the_sum(seed):
    rng = random.Random(seed)
    for _ in range(400):
        a, b = rng.randint(0, 999), rng.randint(0, 10 ** rng.randint(1, 3) - 1)
        results = _columns(arithmetic.add_columns(a, b))
        assert all(0 <= r <= 19 for r in results)
        head = results[-1]
        assert head * 10 ** (len(results) - 1) + _value([r % 10 for r in results[:-1]]) == a + b


@pytest.mark.parametrize("seed", range(4))
def test_subtraction_columns_compose_the_difference(seed):
    rng = random.Random(seed)
    for _ in range(400):
        a, b = sorted((rng.randint(0, 999), rng.randint(0, 999)), reverse=True)
        results = _columns(arithmetic.subtract_columns(a, b))
        assert all(0 <= r <= 9 for r in results)
        assert _value(results) == a - b


def test_comparison_stops_at_the_first_difference():
    assert arithmetic.compare_lines(45, 123) == ["0<1"]
    assert arithmetic.compare_lines(152, 123) == ["1=1", "5>2"]
    assert arithmetic.compare_lines(77, 77) == ["7=7", "7=7"]


def test_traces_are_the_documented_ones():
    assert arithmetic.trace("+", 57, 8, "low").split("\n") == ["7+8=15", "5+0+1=6"]
    assert arithmetic.trace("-", 4, 12, "high").split("\n") == [
        "4-12", "0<1", "12-4", "2-4+10=8", "1-0-1=0", "=-8",
    ]  # fmt: skip
    assert arithmetic.trace("+", 95, 7, "max").split("\n") == [
        "95+7", "5+7=12", "9+0+1=10", "=102",
        "check 102-7", "2-7+10=5", "0-0-1+10=9", "1-0-1=0", "=95", "ok",
    ]  # fmt: skip
    assert arithmetic.trace("-", 30, 12, "instruct").split("\n") == [
        "3>1", "0-2+10=8", "3-1-1=1", "=18",
    ]  # fmt: skip


def test_reasoning_grows_with_effort():
    for op in "+-":
        lengths = [len(arithmetic.trace(op, 345, 678, s)) for s in ("low", "high", "max")]
        assert lengths[0] < lengths[1] < lengths[2]


def test_operands_respect_the_split_and_cover_all_lengths():
    rng = random.Random(0)
    lengths = set()
    for _ in range(3000):
        a, b = arithmetic.draw_operands(rng, "+", arithmetic.train_pair("+"))
        assert 0 <= a <= 999
        assert 0 <= b <= 999
        assert not is_heldout_pair(a, b)
        assert not is_heldout_pair(a + b, b)
        lengths.add((len(str(a)), len(str(b))))
    assert len(lengths) == 9
    a, b = arithmetic.draw_operands(rng, "-", is_heldout_pair)
    assert is_heldout_pair(a, b)


@pytest.mark.parametrize("lexicon", [TRAIN, HELDOUT], ids=["train", "heldout"])
def test_the_prompt_names_both_operands(lexicon):
    rng = random.Random(3)
    for _ in range(500):
        turn = arithmetic.arithmetic_turn(rng, lexicon, "high")
        first = turn.messages[1]["reasoning_content"].split("\n")[0]
        a, op, b = re.fullmatch(r"(\d+)([+-])(\d+)", first).groups()
        assert sorted(re.findall(r"\d+", turn.user)) == sorted([a, b])
        answer = int(a) + int(b) if op == "+" else int(a) - int(b)
        assert turn.expect.answer == turn.messages[1]["content"] == str(answer)
