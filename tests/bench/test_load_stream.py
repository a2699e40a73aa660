import json
from typing import Any

import pytest

from moonlet.bench.load.stream import Arrival, Reading, read_body, read_stream
from tests.bench.load_server import USAGE, delta, stream_of


def events(frames: list[Any], *, end: str = "\n\n") -> list[bytes]:
    """Each frame as it goes over the wire."""
    texts = (frame if isinstance(frame, str) else json.dumps(frame) for frame in frames)
    return [f"data: {text}{end}".encode() for text in texts]


def read(*timed: tuple[float, list[Any]]) -> Reading:
    """Read frames that came together at given times."""
    return read_stream([Arrival(at_s, b"".join(events(frames))) for at_s, frames in timed])


def test_tokens_have_the_time_of_their_frame() -> None:
    role, one, two, three, end, usage = stream_of("one ", "two ", "three")
    reading = read(
        (1.0, [role]), (1.5, [one]), (1.75, [two, three]), (2.0, [end]), (2.5, [usage, "[DONE]"])
    )
    # two frames in one packet came at one time, which is a gap of nothing
    assert reading.token_times_s == [1.5, 1.75, 1.75]
    assert reading.message == {"role": "assistant", "content": "one two three"}
    assert reading.finish_reason == "stop"
    assert reading.problem is None
    assert (reading.count("prompt_tokens"), reading.count("completion_tokens")) == (100, 3)
    assert reading.cached_tokens == 64


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_bytes_may_be_cut_anywhere(size: int, end: str) -> None:
    parts = [b": a comment" + end.encode()]
    parts += events([*stream_of("ein ", "\u00dc"), "[DONE]"], end=end)
    raw = b"".join(parts)
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    reading = read_stream([Arrival(float(i), piece) for i, piece in enumerate(pieces)])
    assert reading.problem is None
    assert reading.message["content"] == "ein \u00dc"
    # a frame is there when its line has ended, not when it began; comment and role come first
    ends = [len(b"".join(parts[: i + 1])) - len(end) + len(end) // 2 - 1 for i in (2, 3)]
    assert reading.token_times_s == [float(at // size) for at in ends]


def test_reasoning_and_calls_are_tokens_and_are_sent_back() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {"index": index, "function": function}

    started = {"index": 0, "id": "lookup_0", "type": "function", "function": {"name": "lookup"}}
    other = {"index": 1, "id": "add_1", "type": "function", "function": {"name": "add"}}
    reading = read(
        (1.0, [delta(reasoning_content="let ")]),
        (2.0, [delta(reasoning_content="me")]),
        # the end of reasoning is marked by an empty text
        (3.0, [delta(reasoning_content="")]),
        (4.0, [delta(tool_calls=[{**started}])]),
        (5.0, [delta(tool_calls=[call(0, arguments='{"a":')])]),
        (6.0, [delta(tool_calls=[call(0, arguments="1}"), {**other}])]),
        (7.0, [delta("tool_calls"), "[DONE]"]),
    )
    assert reading.token_times_s == [1.0, 2.0, 4.0, 5.0, 6.0]
    assert reading.finish_reason == "tool_calls"
    function = {"name": "lookup", "arguments": '{"a":1}'}
    assert reading.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "let me",
        "tool_calls": [
            {"id": "lookup_0", "type": "function", "function": function},
            {"id": "add_1", "type": "function", "function": {"name": "add", "arguments": ""}},
        ],
    }


def test_completions_have_text_instead_of_deltas() -> None:
    frames = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in "ab"]
    reading = read((1.0, frames[:1]), (2.0, [frames[1], "[DONE]"]))
    assert reading.token_times_s == [1.0, 2.0]
    assert reading.message["content"] == "ab"


def test_only_the_first_choice_is_timed() -> None:
    second = {"choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": "length"}]}
    reading = read((1.0, [delta(content="a")]), (2.0, [second]), (3.0, [delta("stop"), "[DONE]"]))
    assert reading.token_times_s == [1.0]
    assert reading.finish_reason == "stop"


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, (None, None, None)),
        ({"prompt_tokens": 5, "completion_tokens": 2}, (5, 2, None)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, (5, None, None)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {}}, (5, None, None)),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, (None, None, 0)),
        ({"prompt_tokens": "5", "prompt_tokens_details": {"cached_tokens": "1"}}, (None,) * 3),
    ],
)
def test_usage_is_what_the_server_gave(
    usage: dict[str, Any] | None, expected: tuple[int | None, ...]
) -> None:
    reading = read((1.0, [*stream_of("a", usage=usage), "[DONE]"]))
    found = (reading.count("prompt_tokens"), reading.count("completion_tokens"))
    assert (*found, reading.cached_tokens) == expected


def test_usage_in_the_end_frame_counts_where_there_is_no_other() -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": USAGE}]}
    assert read((1.0, [end, "[DONE]"])).count("prompt_tokens") == 100


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        (["[DONE]"], None),
        ([], "stream without [DONE]"),
        (stream_of("a"), "stream without [DONE]"),
        ([delta(content="a"), "{"], "broken stream"),
        ([delta(content="a"), "7", "[DONE]"], "broken stream"),
        ([{"choices": [3]}, "[DONE]"], "broken stream"),
        ([{"choices": [{"delta": {"content": 5}}]}, "[DONE]"], "broken stream"),
        ([delta(content="a"), {"error": {"message": "engine died"}}], "broken stream"),
    ],
)
def test_a_stream_is_whole_or_its_problem_is_named(frames: list[Any], problem: str | None) -> None:
    assert read((1.0, frames)).problem == problem


def test_an_error_in_the_stream_keeps_its_words() -> None:
    reading = read((1.0, [delta(content="a"), {"error": {"message": "engine died"}}]))
    assert "engine died" in reading.detail
    assert reading.token_times_s == [1.0]


def test_a_whole_body_has_no_times() -> None:
    message = {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
    reply = {"choices": [{"message": message, "finish_reason": "length"}], "usage": USAGE}
    reading = read_body(json.dumps(reply).encode())
    assert reading.token_times_s == []
    assert (reading.message, reading.finish_reason) == (message, "length")
    assert (reading.count("completion_tokens"), reading.cached_tokens) == (3, 64)
    text = read_body(b'{"choices": [{"text": "hi"}]}')
    assert (text.problem, text.message["content"]) == (None, "")
    for raw in (b"", b"<html>", b"[]", b'{"choices": []}'):
        assert read_body(raw).problem == "answer is no completion"
