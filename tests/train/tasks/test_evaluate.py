import json

import pytest

from moonlet.chat.bpe import tokenizer_files
from moonlet.chat.events import ParsedMessage, ToolCall
from moonlet.chat.render import render
from moonlet.chat.tokenizer import Tokenizer
from moonlet.train.tasks import checks
from moonlet.train.tasks.evaluate import evaluate, run_items, summarize
from moonlet.train.tasks.heldout import FAMILIES, heldout_items
from moonlet.train.tasks.sample import Expect, ExpectedCall
from moonlet.train.tasks.tokenizer_corpus import train_ranks

COUNT = 12
MODES = ((True, "low"), (True, "high"), (True, "max"), (False, None))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, data in tokenizer_files(train_ranks(700, num_samples=100)).items():
        (directory / name).write_bytes(data)
    return Tokenizer.from_dir(directory)


class Oracle:
    """Knows every right reply; ``spoil`` changes what it says."""

    def __init__(self, tokenizer, spoil=lambda ids: ids):
        self.spoil = spoil
        self.known = []
        for family in FAMILIES:
            for thinking, effort in MODES:
                for item in heldout_items(family, COUNT, thinking=thinking, thinking_effort=effort):
                    segments = render(
                        item.turn.messages, item.tools, thinking=thinking, thinking_effort=effort,
                        add_generation_prompt=False,
                    )  # fmt: skip
                    self.known.append(tokenizer.encode_segments(segments))
        self.end = tokenizer.special_ids.end_of_msg

    def generate(self, prompts):
        replies = []
        for prompt in prompts:
            whole = next(k for k in self.known if k[: len(prompt)] == prompt)
            rest = whole[len(prompt) :]
            replies.append(self.spoil(rest[: rest.index(self.end) + 1]))
        return replies


def test_right_replies_score_full_marks(tokenizer):
    report = evaluate(Oracle(tokenizer), tokenizer, COUNT)
    json.dumps(report)
    assert all(report["passes"].values())
    for family in FAMILIES:
        assert report["families"][family]["accuracy"] == 1.0
        assert report["families"][family]["valid_and_stopped"] == 1.0
    for mode in (report["instruct"], *report["efforts"].values()):
        assert all(summary["accuracy"] == 1.0 for summary in mode.values())


def test_unfinished_replies_count_as_wrong_markup(tokenizer):
    items = heldout_items("frame", COUNT)
    outcomes = run_items(Oracle(tokenizer, lambda ids: ids[:-1]), tokenizer, items)
    summary = summarize(outcomes)
    assert summary["valid_and_stopped"] == 0.0
    assert summary["accuracy"] == 1.0


def test_a_wrong_call_fails_at_the_first_step(tokenizer):
    close = tokenizer.special_ids.close
    drop = tokenizer.encode("e") + tokenizer.encode("1")

    def spoil(ids):
        # change the value of the last argument: one more character before its closing tag
        at = max(
            (i for i in range(len(ids)) if ids[i] == close
             and tokenizer.decode(ids[i + 1 : i + 2]) == "argument"),
            default=None,
        )  # fmt: skip
        return ids if at is None else [*ids[:at], *drop, *ids[at:]]

    items = [i for i in heldout_items("tools", 40) if i.expect.calls][:COUNT]
    outcomes = run_items(Oracle(tokenizer, spoil), tokenizer, items)
    assert {o.failed_step for o in outcomes} == {"call"}
    assert summarize(outcomes)["failed_calls"] == COUNT


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        (1, 1, True), (1.0, 1, True), ("1", 1, False), (True, 1, False), (1, True, False),
        (True, True, True), ("a", "a", True), ("A", "a", False), (None, "a", False),
        (2.5, 2.5, True),
    ],
)  # fmt: skip
def test_values_compare_with_their_types(got, wanted, same):
    assert checks.is_same_value(got, wanted) is same


def _message(**changes):
    return ParsedMessage(reasoning_content="", content="", **changes)


def test_calls_need_the_exact_name_and_arguments():
    expect = Expect(answer="", calls=(ExpectedCall(name="go", arguments={"n": 2}),))
    good = ToolCall("go", '{"n": 2}')
    assert checks.are_right_calls(_message(tool_calls=(good,)), expect)
    for bad in (
        (), (good, good), (ToolCall("went", '{"n": 2}'),), (ToolCall("go", '{"n": 2, "m": 1}'),),
        (ToolCall("go", "{}"),), (ToolCall("go", '{"n": '),), (ToolCall("go", "[2]"),),
    ):  # fmt: skip
        assert not checks.are_right_calls(_message(tool_calls=bad), expect)


def test_strict_markup(tokenizer):
    def ids(text):
        return tokenizer.encode(text, allow_special=True)

    done = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    thought = "so<|close|>think<|sep|><|open|>response<|sep|>"
    assert checks.is_valid_xtml(ids(thought + "5" + done), tokenizer, thinking=True)
    assert checks.is_valid_xtml(ids("5" + done), tokenizer, thinking=False)
    call = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="k" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    with_call = thought + "<|close|>response<|sep|>" + call
    assert checks.is_valid_xtml(ids(with_call), tokenizer, thinking=True)
    for broken in (
        "5" + done,
        thought + "5" + done + "<|end_of_msg|>",
        thought + "5" + done.replace("<|end_of_msg|>", ""),
        thought + "5<|close|>response<|sep|> <|close|>message<|sep|><|end_of_msg|>",
        with_call.replace('type="number"', 'type="int"'),
        with_call.replace("<|close|>call<|sep|>", ""),
    ):
        assert not checks.is_valid_xtml(ids(broken), tokenizer, thinking=True)
