"""The stand-ins themselves: a fake that is too forgiving hides bugs."""

import pytest
import torch

from moonlet.chat.segments import Segment
from moonlet.core.errors import ShapeError
from moonlet.model.simple_state import NoState
from moonlet.model.state import BatchMeta
from moonlet.testing import (
    ByteTokenizer,
    ScriptedModel,
    assert_close,
    assert_same_choice,
    count_up,
    error_ratio,
    reply_with,
    tiny_config,
    tiny_model,
)


def feed(model: ScriptedModel, start: int, tokens: list[int], *, tentative: bool = False) -> int:
    meta = BatchMeta.build([len(tokens)], slots=[3], start_positions=[start], tentative=[tentative])
    hidden = model.forward(torch.tensor(tokens), meta, NoState(model.config))
    return int(model.logits(hidden[meta.logits_at_Q]).argmax())


def test_script_sees_prompt_and_output() -> None:
    seen = []

    def script(prompt: list[int], output: list[int]) -> int:
        seen.append((list(prompt), list(output)))
        return 5

    model = ScriptedModel(script)
    assert feed(model, 0, [1, 2]) == 5
    assert feed(model, 2, [5]) == 5
    assert seen == [([1, 2], []), ([1, 2], [5])]
    assert (model.num_forward_calls, model.num_rows, model.batch_sizes) == (2, 3, [1, 1])


@pytest.mark.parametrize("start", [1, 3, 4])
def test_lost_or_repeated_tokens_are_an_error(start: int) -> None:
    model = ScriptedModel(count_up())
    feed(model, 0, [1, 2])
    with pytest.raises(ShapeError, match=f"continued at {start}"):
        feed(model, start, [3])


def test_tentative_rows_can_be_taken_back() -> None:
    model = ScriptedModel(count_up())
    feed(model, 0, [1, 2])
    feed(model, 2, [7, 8, 9], tentative=True)
    assert feed(model, 3, [20]) == 21
    with pytest.raises(ShapeError):
        feed(model, 3, [8])


def test_scripts() -> None:
    fixed = reply_with([7, 8], 2)
    assert [fixed([1], [0] * n) for n in range(4)] == [7, 8, 2, 2]
    echo = reply_with(lambda prompt: prompt, 2)
    assert [echo([4, 5], [0] * n) for n in range(3)] == [4, 5, 2]
    assert count_up(10)([9], []) == 0
    assert count_up(10)([9], [3]) == 4


def test_byte_tokenizer_has_the_names_and_offsets_of_k3() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == tiny_config().vocab_size == 512
    assert tokenizer.encode("hi é") == list("hi é".encode())
    assert tokenizer.decode(list("hi é".encode())) == "hi é"
    assert tokenizer.id("<|end_of_msg|>") == tiny_config().eos_token_id == 258
    assert tokenizer.id("[PAD]") == tiny_config().pad_token_id == 511
    ids = tokenizer.encode_segments([Segment("<|open|>", allow_special=True), Segment("<|open|>")])
    assert ids == [259, *b"<|open|>"]
    assert not tokenizer.missing_xtml_names()


def test_tiny_model_is_reproducible_and_finite() -> None:
    first, second, other = tiny_model(), tiny_model(), tiny_model(seed=1)
    for (name, left), (_, right) in zip(
        first.state_dict().items(), second.state_dict().items(), strict=True
    ):
        assert torch.isfinite(left).all(), name
        assert torch.equal(left, right), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_closeness_checks_can_fail() -> None:
    left, right = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.1]])
    assert assert_close(left, right, atol=0.2) == pytest.approx(0.1)
    with pytest.raises(AssertionError, match=r"\(0, 1\).*2.0 against 2.09"):
        assert_close(left, right, atol=0.05)
    with pytest.raises(AssertionError, match="against"):
        assert_close(left, right[0], atol=1.0)
    with pytest.raises(AssertionError):
        assert_close(left, torch.full_like(left, torch.nan), atol=1.0)
    with pytest.raises(AssertionError, match="greedy choice"):
        assert_same_choice(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]]), atol=2.0)
    assert error_ratio(left, left) == 0.0
    assert error_ratio(left * torch.nan, left) == float("inf")
