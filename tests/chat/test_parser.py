"""Behaviour of the output parser beyond the golden vectors."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.chat.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    IncompleteCall,
    ReasoningDelta,
    ReasoningEnd,
    ToolCall,
)
from moonlet.chat.parser import Parser
from moonlet.chat.special_tokens import XTMLIds
from moonlet.chat.text_adapter import TextAdapter
from moonlet.core.errors import ConfigError
from tests.chat import parsing
from tests.chat.parsing import END, C, O, S, close, parse, tag

TABLE = parsing.ByteTable()
TOOLS = close("think") + tag("tools")
ONE_CALL = tag("call", tool="f") + close("call")


def argument(text: str, kind: str) -> str:
    """The JSON text that one argument value becomes."""
    value = tag("argument", key="k", type=kind) + text + close("argument")
    message = parse(TOOLS + tag("call", tool="f") + value + close("call"))
    return message.tool_calls[0].arguments.removeprefix('{"k": ').removesuffix("}")


# ---- headers ------------------------------------------------------------------------------------


def test_header_of_exactly_the_longest_length_is_a_tag() -> None:
    padded = "think".ljust(4096)
    assert parse("r" + C + padded + S + "x").content == "x"
    assert parse("r" + C + padded + " " + S + "x").reasoning_content == f"r{C}{padded} {S}x"


def test_header_that_cannot_become_a_tag_streams_at_once() -> None:
    parser = Parser(TABLE)
    assert parser.feed(TABLE.encode_markup(C + "thin")) == []
    assert parser.feed(TABLE.encode_markup("g")) == [ReasoningDelta(C + "thing")]


def test_attributes_do_not_belong_in_a_close_tag_of_a_value() -> None:
    text = f"a{C}argument x{S}b"
    assert json.loads(argument(text, "string")) == text


def test_second_marker_turns_the_first_into_text() -> None:
    message = parse("r" + close("think") + tag("response") + "a" + C + O + C + "response" + S)
    assert message.content == "a" + C + O


@pytest.mark.parametrize("end", [[TABLE.names[END]], []])
def test_header_cut_by_the_end_is_discarded(end: list[int]) -> None:
    ids = TABLE.encode_markup("r" + close("think") + tag("response") + "ok" + C + "resp")
    message, _ = parsing.run(Parser(TABLE), [ids + end], "length")
    assert message.content == "ok"
    assert message.ended is bool(end)


# ---- channels -----------------------------------------------------------------------------------


def test_blank_text_before_implicit_content_is_kept_and_before_a_tag_dropped() -> None:
    assert parse("r" + close("think") + "\n a").content == "\n a"
    assert parse("r" + close("think") + "\n " + tag("response") + "a").content == "a"
    assert parse("r" + close("think") + "\n ").content == ""


def test_text_after_an_answer_is_dropped() -> None:
    message = parse("a" + close("response") + "stray" + close("message"), "instruct")
    assert message.content == "a"
    message = parse("answer" + close("response") + "stray" + close("message"))
    assert (message.content, message.reclassified) == ("answer", True)


def test_message_open_tag_ends_the_message_except_as_the_very_first_thing() -> None:
    opener = tag("message", role="assistant")
    message = parse(opener + tag("think") + "r" + opener + "lost", "none")
    assert (message.reasoning_content, message.ended) == ("r", False)
    message = parse(TOOLS + tag("call", tool="f") + opener + "lost")
    assert [call.name for call in message.tool_calls] == ["f"]


def test_skipped_think_is_sent_again_as_content_at_the_end() -> None:
    parser = Parser(TABLE)
    events = parser.feed(TABLE.encode_markup("four" + close("response") + close("message")))
    assert events == [ReasoningDelta("four"), ReasoningEnd()]
    assert parser.finish("stop") == [ContentDelta("four", reclassified=True)]
    message = parser.result()
    assert (message.content, message.reasoning_content) == ("four", "")
    assert message.reasoning_tokens == 0


def test_skipped_think_stays_reasoning_beside_a_cut_call() -> None:
    message = parse("four" + close("response") + tag("call", tool="f"), finish="length")
    assert (message.content, message.reasoning_content) == ("", "four")
    assert message.incomplete_call == IncompleteCall("f", "")


def test_instruct_mode_has_no_reasoning_even_if_the_model_thinks() -> None:
    raw = tag("think") + "hm" + close("think") + tag("response") + "hi"
    message = parse(raw, "instruct")
    assert (message.reasoning_content, message.content) == (None, "hi")
    assert message.reasoning_tokens == 2


def test_prefix_may_continue_in_another_channel() -> None:
    message = parse(" sir" + close("response"), "thinking", start="response")
    assert (message.reasoning_content, message.content) == ("", " sir")


def test_reasoning_tokens_leave_out_tags_and_count_literal_markers() -> None:
    raw = tag("think") + "abc" + C + "x" + close("think") + tag("response") + "de"
    # a, b, c and the two tokens of the marker that closes nothing
    assert parse(raw).reasoning_tokens == 5
    assert parse("ab" + C + "thi", finish="length").reasoning_tokens == 2
    assert parse("two" + close("think") + tag("think") + "more").reasoning_tokens == 7


def test_parser_is_done_at_the_end_of_the_message() -> None:
    parser = Parser(TABLE, "instruct")
    parser.feed(TABLE.encode_markup("hi" + C + "message"))
    assert not parser.is_done
    parser.feed(TABLE.encode_markup(S))
    assert parser.is_done
    assert parser.feed(TABLE.encode_markup("x" + tag("think") + END)) == []


# ---- calls --------------------------------------------------------------------------------------


def test_atomic_stream_sends_a_call_in_one_piece() -> None:
    value = tag("argument", key="q") + "v" + close("argument")
    ids = TABLE.encode_markup(TOOLS + tag("call", tool="f") + value + close("call"))
    parser = Parser(TABLE, tool_stream="atomic")
    *quiet, last = [parser.feed([token_id]) for token_id in ids]
    assert list(itertools.chain.from_iterable(quiet)) == [ReasoningEnd()]
    assert last == [CallStart(0, "f"), CallArguments(0, '{"q": "v"}'), CallEnd(0)]


def test_unwanted_calls_are_parsed_and_dropped() -> None:
    raw = "r" + close("think") + tag("response") + "a" + close("response") + tag("tools")
    raw += ONE_CALL + close("tools") + close("message")
    message = parse(raw, keep_calls=False)
    assert (message.content, message.tool_calls, message.finish_reason) == ("a", (), "stop")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[ 1,2 ]", "[1, 2]"),
        ("-0.50", "-0.5"),
        ("\t true ", "true"),
        ('{"a":1,"a":2}', '{"a": 2}'),
        ('"\\ud83d\\ude00"', '"\U0001f600"'),
        # not JSON, or nothing that could be written back: the raw text as a string
        ("Infinity", '"Infinity"'),
        ("1e999", '"1e999"'),
        ("01", '"01"'),
        ("", '""'),
        ("[1,]", '"[1,]"'),
        ('"a\nb"', '"\\"a\\nb\\""'),
    ],
)
def test_typed_values(text: str, expected: str) -> None:
    assert argument(text, "object") == expected


def test_lone_surrogate_escape_stays_encodable() -> None:
    text = argument('"\\ud800x"', "object")
    assert text == '"\\ud800x"'
    assert text.encode()


def test_hostile_values_are_strings_not_crashes() -> None:
    deep = "[" * 100_000
    assert json.loads(argument(deep, "array")) == deep
    digits = "9" * 10_000
    assert json.loads(argument(digits, "number")) == digits


def test_string_value_escapes_only_what_json_demands() -> None:
    text = 'q" b\\ \x00\x1f\x7f/\u2028é'
    assert argument(text, "string") == '"q\\" b\\\\ \\u0000\\u001f\x7f/\u2028é"'


def test_json_block_and_arguments_exclude_each_other() -> None:
    block = tag("json", type="object") + '{"a":1}' + close("json")
    value = tag("argument", key="b") + "x" + close("argument")
    opener = tag("call", tool="f")
    (call,) = parse(TOOLS + opener + block + value + block + close("call")).tool_calls
    assert call.arguments == '{"a": 1}'
    (call,) = parse(TOOLS + opener + value + block + close("call")).tool_calls
    assert call.arguments == '{"b": "x"}'


@pytest.mark.parametrize(
    ("block", "expected"), [(" ", "{}"), ("", "{}"), ("[1]", "[1]"), ("NaN", "NaN")]
)
def test_json_block_without_an_object(block: str, expected: str) -> None:
    raw = TOOLS + tag("call", tool="f") + tag("json") + block + close("json") + close("call")
    assert parse(raw).tool_calls == (ToolCall("f", expected),)


def test_cut_call_is_delivered_last_only_after_a_length_stop() -> None:
    raw = TOOLS + ONE_CALL + tag("call", tool="g") + tag("argument", key="q") + "par"
    cut = parse(raw, finish="length")
    assert cut.message_calls() == (ToolCall("f", "{}"), ToolCall("g", '{"q": "par'))
    assert cut.message_calls("atomic") == (ToolCall("f", "{}"),)
    assert cut.finish_reason == "length"
    assert parse(raw, finish="stop").message_calls() == (ToolCall("f", "{}"),)


def test_content_of_the_reply_is_none_only_beside_calls() -> None:
    assert parse(TOOLS + ONE_CALL).message_content() is None
    assert parse("r" + close("think")).message_content() == ""
    assert parse("hi", "instruct").message_content() == "hi"


def test_nameless_call_with_arguments_leaves_no_trace() -> None:
    nameless = tag("call") + tag("argument", key="q") + "v"
    assert parse(TOOLS + nameless, finish="length").incomplete_call is None
    message = parse(TOOLS + nameless + close("call") + ONE_CALL)
    assert message.tool_calls == (ToolCall("f", "{}"),)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"mode": "thinks"}, {"tool_stream": "lazy"}, {"start": "tools"}]
)
def test_unknown_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options.values()))):
        Parser(TABLE, **options)


def test_vocabulary_without_markers_is_refused() -> None:
    class Plain(parsing.ByteTable):
        special_ids = XTMLIds.from_names({"[EOS]": 256})

    with pytest.raises(ConfigError, match=r"no <\|open\|>"):
        Parser(Plain())


# ---- text adapter -------------------------------------------------------------------------------


def test_partial_spelling_is_held_back_and_released() -> None:
    adapter = TextAdapter("instruct")
    assert adapter.feed("a <|clo") == [ContentDelta("a ")]
    assert adapter.feed("ck|>") == [ContentDelta("<|clock|>")]
    assert adapter.feed(" <|") == [ContentDelta(" ")]
    assert adapter.finish() == [ContentDelta("<|")]


def test_text_adapter_accepts_other_end_spellings() -> None:
    adapter = TextAdapter("instruct", end_spellings=("[EOS]", END))
    adapter.feed("hi[EOS]lost")
    adapter.finish()
    assert (adapter.result().content, adapter.result().ended) == ("hi", True)
    assert adapter.is_done


# ---- any stream ---------------------------------------------------------------------------------

NAMES = ["think", "response", "tools", "call", "argument", "json", "message", "thin", "x"]
FRAGMENTS = st.one_of(
    st.sampled_from(NAMES).map(close),
    st.sampled_from(NAMES).map(tag),
    st.sampled_from([tag("call", tool="f"), tag("argument", key="k", type="number")]),
    st.sampled_from([O, C, S, C + " think " + S, O + "cal", O + "call ", "1", " ", "\n", 'a"\\']),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
ITEMS = st.lists(
    st.one_of(
        FRAGMENTS.map(TABLE.encode_markup),
        st.lists(st.integers(0, 255), max_size=3),
        st.sampled_from(["[PAD]", "[BOS]"]).map(lambda name: [TABLE.names[name]]),
    ),
    max_size=20,
).map(lambda items: list(itertools.chain.from_iterable(items)))
MODES = st.sampled_from(["thinking", "instruct", "none"])


def test_hidden_reasoning_of_a_skipped_answer_arrives_as_content() -> None:
    raw = O + "think" + S + O + C + "response" + S
    message, events = parsing.run(Parser(TABLE, "instruct"), [TABLE.encode_markup(raw)])
    parsing.check_replay(events, message, "incremental")
    assert events == [ContentDelta(O, reclassified=True)]


@given(ids=ITEMS, mode=MODES, has_end=st.booleans(), data=st.data())
@settings(max_examples=400)
def test_any_stream_gives_one_message_in_every_split(
    ids: list[int], mode: Any, has_end: bool, data: st.DataObject
) -> None:
    if has_end:
        ids = [*ids, TABLE.names[END]]
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    tool_stream = data.draw(st.sampled_from(["incremental", "atomic"]))
    whole, events = parsing.run(Parser(TABLE, mode), [ids], "length")
    parsing.check_replay(events, whole, "incremental")
    pieces = parsing.split_at(ids, cuts)
    other, events = parsing.run(Parser(TABLE, mode, tool_stream=tool_stream), pieces, "length")
    parsing.check_replay(events, other, tool_stream)
    assert other == whole
    if "json_block" not in whole.flags:
        assert all(isinstance(json.loads(call.arguments), dict) for call in whole.tool_calls)


@given(fragments=st.lists(FRAGMENTS, max_size=20), mode=MODES, data=st.data())
@settings(max_examples=200)
def test_text_adapter_agrees_with_the_parser(
    fragments: list[str], mode: Any, data: st.DataObject
) -> None:
    raw = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=8))
    by_ids, _ = parsing.run(Parser(TABLE, mode), [TABLE.encode_markup(raw)])
    by_text, events = parsing.run(TextAdapter(mode), parsing.split_at(raw, cuts))
    parsing.check_replay(events, by_text, "incremental")
    assert parsing.as_golden(by_text) == parsing.as_golden(by_ids)
