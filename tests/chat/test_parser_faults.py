"""Faults that other parsers of this protocol had, each with the input that showed it."""

import json

import pytest

from moonlet.chat.events import CallArguments, CallEnd, CallStart, ContentDelta, ReasoningDelta
from moonlet.chat.parser import Parser
from tests.chat import parsing
from tests.chat.parsing import END, close, one_by_one, parse, tag

TABLE = parsing.ByteTable()
CALL_F = tag("call", tool="f", index="1") + close("call")
CLOSING = close("message") + END


def call(name: str, **strings: str) -> str:
    arguments = [
        tag("argument", key=key, type="string") + value + close("argument")
        for key, value in strings.items()
    ]
    return tag("call", tool=name, index="1") + "".join(arguments) + close("call")


def test_b09_skipped_think_close_keeps_the_call() -> None:
    message = parse("plan " + tag("tools") + CALL_F + close("tools") + CLOSING)
    assert message.reasoning_content == "plan "
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("f", "{}")]
    assert message.finish_reason == "tool_calls"


def test_b10_empty_think_then_response_is_content() -> None:
    message = parse(close("think") + tag("response") + "Hello" + close("response") + CLOSING)
    assert (message.content, message.reasoning_content) == ("Hello", "")


def test_b10_opener_without_separator_is_not_filed_as_reasoning() -> None:
    message = parse(close("think") + "<|open|>response" + "Hello" + close("response") + CLOSING)
    assert message.reasoning_content == ""
    assert message.content.endswith("Hello")


def test_b12_missing_response_close_shows_no_marker() -> None:
    message = parse("r" + close("think") + tag("response") + "Hi" + CLOSING)
    assert (message.content, message.reasoning_content) == ("Hi", "r")


def test_b14_long_string_argument_streams() -> None:
    value = 'say "ü" \\ \n' * 2000
    raw = close("think") + tag("tools") + call("write", text=value) + close("tools") + CLOSING
    ids = TABLE.encode_markup(raw)
    parser = Parser(TABLE)
    deltas: list[str] = []
    fed_at_first_delta = 0
    for position, token_id in enumerate(ids):
        for event in parser.feed([token_id]):
            if isinstance(event, CallArguments):
                fed_at_first_delta = fed_at_first_delta or position
                deltas.append(event.text)
    assert fed_at_first_delta < len(ids) - len(value)
    assert max(map(len, deltas)) < 20
    assert json.loads("".join(deltas)) == {"text": value}


def test_b14_other_values_are_sent_when_they_close() -> None:
    parser = Parser(TABLE)
    argument = tag("argument", key="n", type="number")
    head = close("think") + tag("tools") + tag("call", tool="f") + argument
    assert CallArguments(0, '{"n": ') in parser.feed(TABLE.encode_markup(head + "12"))
    assert parser.feed(TABLE.encode_markup("3")) == []
    events = parser.feed(TABLE.encode_markup(close("argument")))
    assert events == [CallArguments(0, "123")]


@pytest.mark.parametrize("stop_name", ["[EOS]", END, "[EOT]", None])
def test_b15_tools_inside_the_response_with_any_end(stop_name: str | None) -> None:
    raw = "r" + close("think") + tag("response") + "text"
    raw += tag("tools") + CALL_F + close("tools") + close("message")
    ids = TABLE.encode_markup(raw)
    if stop_name is not None:
        ids.append(TABLE.names[stop_name])
    message, _ = parsing.run(Parser(TABLE), [ids])
    assert (message.content, len(message.tool_calls)) == ("text", 1)
    assert (message.finish_reason, message.ended) == ("tool_calls", True)


def test_b16_one_chunk_and_every_two_and_three_way_split_agree() -> None:
    raw = "r" + close("think") + tag("response") + close("response")
    ids = TABLE.encode_markup(raw + tag("tools") + CALL_F + close("tools") + CLOSING)
    whole, _ = parsing.run(Parser(TABLE), [ids])
    assert len(whole.tool_calls) == 1
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            chunks = parsing.split_at(ids, [first, second])
            assert parsing.run(Parser(TABLE), chunks)[0] == whole


def test_b17_interleaved_streams_do_not_touch_each_other() -> None:
    num_streams = 12
    streams, parsers = [], [Parser(TABLE) for _ in range(num_streams)]
    for number in range(num_streams):
        raw = f"plan {number}" + close("think") + tag("tools")
        raw += call(f"tool_{number}", city=f"C{number}") + close("tools") + CLOSING
        streams.append(TABLE.encode_markup(raw))
    for position in range(max(map(len, streams))):
        for parser, ids in zip(parsers, streams, strict=True):
            parser.feed(ids[position : position + 1])
    for number, parser in enumerate(parsers):
        parser.finish("stop")
        (found,) = parser.result().tool_calls
        assert found.name == f"tool_{number}"
        assert json.loads(found.arguments) == {"city": f"C{number}"}


def test_b17_finish_is_tool_calls_only_when_one_was_delivered() -> None:
    nameless = tag("call", index="1") + close("call")
    message = parse(close("think") + tag("tools") + nameless + close("tools") + CLOSING)
    assert message.tool_calls == ()
    assert message.finish_reason == "stop"


def test_b18_name_is_whole_in_the_first_event_of_its_call() -> None:
    raw = close("think") + tag("tools")
    raw += call("browser_open", url="a") + call("browser_close", url="b") + close("tools")
    _, events = parsing.run(Parser(TABLE), one_by_one(TABLE.encode_markup(raw + CLOSING)))
    starts = [event for event in events if isinstance(event, CallStart)]
    assert starts == [CallStart(0, "browser_open"), CallStart(1, "browser_close")]
    assert [event.index for event in events if isinstance(event, CallEnd)] == [0, 1]


def test_b19_a_tool_turn_leaves_no_markup_in_text() -> None:
    raw = "r" + close("think") + tag("response") + "ok" + close("response")
    raw += tag("tools") + CALL_F + close("tools") + CLOSING
    _, events = parsing.run(Parser(TABLE), one_by_one(TABLE.encode_markup(raw)))
    texts = [e.text for e in events if isinstance(e, ContentDelta | ReasoningDelta)]
    assert texts == ["r", "o", "k"]


@pytest.mark.parametrize("keep_calls", [True, False])
def test_b20_reasoning_is_separated_whether_tools_are_wanted_or_not(keep_calls: bool) -> None:
    raw = "why" + close("think") + tag("response") + "because" + close("response") + CLOSING
    message = parse(raw, keep_calls=keep_calls)
    assert (message.reasoning_content, message.content) == ("why", "because")


def test_b21_spelled_close_tag_in_a_value_is_text() -> None:
    spelled = "x<|close|>argument<|sep|>y"
    ids = TABLE.encode_markup(
        close("think") + tag("tools") + tag("call", tool="f") + tag("argument", key="q")
    )
    ids += TABLE.encode(spelled)
    ids += TABLE.encode_markup(close("argument") + close("call") + close("tools") + CLOSING)
    message, _ = parsing.run(Parser(TABLE), one_by_one(ids))
    assert json.loads(message.tool_calls[0].arguments) == {"q": spelled}
