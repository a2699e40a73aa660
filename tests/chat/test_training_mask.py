"""The generated mark: which part of a conversation a model writes itself."""

import json
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonlet.chat.content import image_prompt
from moonlet.chat.parser import Parser
from moonlet.chat.render import render
from moonlet.chat.segments import Segment, display_text
from moonlet.chat.tokenizer import Tokenizer
from tests.chat.conversations import ASSISTANT, CONVERSATIONS, call

TOKENIZER = Tokenizer({bytes((value,)): value for value in range(256)})


def spans(segments: list[Segment]) -> list[str]:
    groups = groupby(segments, key=lambda segment: segment.generated)
    return [display_text(group) for generated, group in groups if generated]


@given(CONVERSATIONS, st.booleans())
def test_the_mask_covers_every_id_once(messages: list[dict[str, Any]], thinking: bool) -> None:
    segments = render(messages, thinking=thinking, add_generation_prompt=False)
    ids, mask = TOKENIZER.encode_with_mask(segments)
    assert ids == TOKENIZER.encode_segments(segments)
    assert len(mask) == len(ids)
    supervised = [i for i, marked in zip(ids, mask, strict=True) if marked]
    masked = [i for i, marked in zip(ids, mask, strict=True) if not marked]
    assert len(supervised) + len(masked) == len(ids)
    assert supervised == TOKENIZER.encode_segments([s for s in segments if s.generated])
    end = TOKENIZER.special_ids.end_of_msg
    num_turns = sum(message["role"] == "assistant" for message in messages)
    assert supervised.count(end) == num_turns == len(spans(segments))


@given(CONVERSATIONS, ASSISTANT, st.booleans())
def test_the_supervised_span_is_what_follows_the_generation_prefix(
    history: list[dict[str, Any]], answer: dict[str, Any], thinking: bool
) -> None:
    prompt = render(history, thinking=thinking)
    whole = render([*history, answer], thinking=thinking, add_generation_prompt=False)
    turn = whole[len(prompt) :]
    assert [s.text for s in whole[: len(prompt)]] == [s.text for s in prompt]
    assert all(segment.generated for segment in turn)
    assert turn[-1] == Segment("<|end_of_msg|>", allow_special=True, generated=True)
    assert not any(segment.generated for segment in whole[len(prompt) - 6 : len(prompt)])


@given(CONVERSATIONS, st.booleans())
def test_the_parser_reads_the_message_back_from_its_supervised_ids(
    messages: list[dict[str, Any]], thinking: bool
) -> None:
    segments = render(messages, thinking=thinking, add_generation_prompt=False)
    turns = [message for message in messages if message["role"] == "assistant"]
    groups = groupby(segments, key=lambda segment: segment.generated)
    generated = [list(group) for mark, group in groups if mark]
    for message, span in zip(turns, generated, strict=True):
        parser = Parser(TOKENIZER, mode="thinking" if thinking else "instruct")
        parser.feed(TOKENIZER.encode_segments(span))
        parser.finish("stop")
        parsed = parser.result()
        reasoning = message.get("reasoning_content", "")
        assert parsed.reasoning_content == ((reasoning.strip() and reasoning) if thinking else None)
        assert parsed.content == message["content"]
        sent = [item["function"] for item in message.get("tool_calls", ())]
        assert [item.name for item in parsed.tool_calls] == [item["name"] for item in sent]
        for got, want in zip(parsed.tool_calls, sent, strict=True):
            assert json.loads(got.arguments) == json.loads(want["arguments"])


def test_two_turns_have_two_spans_with_their_channels() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u1"},
        {
            "role": "assistant",
            "name": "bot",
            "reasoning_content": "r1",
            "content": "a1",
            "tool_calls": [call("f", '{"k": 1}')],
        },
        {"role": "tool", "content": "t", "tool_call_id": "a"},
        {"role": "assistant", "reasoning_content": "r2", "content": "a2"},
    ]
    close = "<|close|>message<|sep|><|end_of_msg|>"
    segments = render(messages, [{"type": "function"}], thinking_effort="max")
    assert spans(segments) == [
        "r1<|close|>think<|sep|><|open|>response<|sep|>a1<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="k" type="number"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>" + close,
        "r2<|close|>think<|sep|><|open|>response<|sep|>a2<|close|>response<|sep|>" + close,
    ]
    assert spans(render(messages, thinking=False))[1] == "a2<|close|>response<|sep|>" + close


@pytest.mark.parametrize("thinking", [True, False])
def test_nothing_is_marked_without_an_assistant_turn(thinking: bool) -> None:
    messages = [{"role": "user", "content": "u"}]
    segments = render(
        messages,
        [{"type": "function"}],
        thinking=thinking,
        thinking_effort="max",
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    assert not any(segment.generated for segment in segments)


def test_the_json_fallback_block_and_images_are_not_marked() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": "x"}],
        "tool_calls": [call("f", '{"a": '), call("g")],
    }
    prompt = image_prompt(3, 4)
    segments = render([message], image_prompts=[prompt], add_generation_prompt=False)
    masked = display_text(segment for segment in segments if not segment.generated)
    assert masked == (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
        + prompt
        + '<|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|>'
    )
