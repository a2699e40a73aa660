"""Streamed chat replies: the stream contract, frame by frame and byte by byte."""

import json
import re
from typing import Any

import pytest

from moonlet.testing import ScriptedModel, reply_with
from tests.serve.running import (
    END,
    MODEL,
    TOKENIZER,
    WEATHER,
    answer,
    call,
    ids_of,
    serving,
)


def _deltas(frames: list[Any]) -> list[dict[str, Any]]:
    return [
        frame["choices"][0]["delta"] for frame in frames if frame != "[DONE]" and frame["choices"]
    ]


def _joined(frames: list[Any], field: str) -> str:
    return "".join(delta.get(field, "") for delta in _deltas(frames))


def test_bytes_of_a_short_stream() -> None:
    with serving(answer("t", "ok")) as running:
        response = running.chat(stream=True)
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    raw = response.content.decode()
    reply_id = re.search(r'"id":"(chatcmpl-[0-9a-f]{24})"', raw)
    created = re.search(r'"created":(\d+)', raw)
    assert reply_id is not None
    assert created is not None
    head = (
        f'"id":"{reply_id[1]}","object":"chat.completion.chunk","created":{created[1]},'
        f'"model":"{MODEL}"'
    )
    prompt_tokens = int(response.headers["x-msh-usage-prompt-tokens"])
    generated = len(answer("t", "ok")) + 1
    usage = (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{generated},'
        f'"total_tokens":{prompt_tokens + generated},'
        '"prompt_tokens_details":{"cached_tokens":0},'
        '"completion_tokens_details":{"reasoning_tokens":1}}'
    )

    def frame(delta: str) -> str:
        return (
            f'data: {{{head},"choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}\n\n'
        )

    assert raw.startswith(
        frame('{"role":"assistant","content":""}')
        + frame('{"reasoning_content":"t"}')
        + frame('{"reasoning_content":""}')
    )
    assert raw.endswith(
        f'data: {{{head},"choices":[{{"index":0,"delta":{{}},"finish_reason":"stop",'
        f'"usage":{usage}}}]}}\n\ndata: [DONE]\n\n'
    )
    # content may come in one frame or two, depending on how far the engine was ahead
    assert "".join(re.findall(r'"delta":{"content":"([^"]*)"}', raw)) == "ok"


def test_frames_keep_the_contract_with_a_tool_call() -> None:
    calls = call("get_weather", city="Oslo") + call("get_weather", 2, city='a "b"\n')
    with serving(answer("thinking é漢", "Let me look.", calls)) as running:
        frames = running.frames(tools=[WEATHER], stream_options={"include_usage": True})
    assert frames[-1] == "[DONE]"
    assert frames.count("[DONE]") == 1
    chunks = frames[:-1]
    for key in ("id", "object", "created", "model"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", chunks[0]["id"])
    assert chunks[0]["choices"][0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "finish_reason": None,
    }
    *increments, end, usage = chunks[1:]
    for chunk in increments:
        assert "usage" not in chunk
        (choice,) = chunk["choices"]
        assert set(choice) == {"index", "delta", "finish_reason"}
        assert choice["finish_reason"] is None
        assert len(choice["delta"]) == 1
        assert next(iter(choice["delta"])) in ("content", "reasoning_content", "tool_calls")
        assert None not in choice["delta"].values()
    kinds = [next(iter(chunk["choices"][0]["delta"])) for chunk in increments]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    assert _joined(frames, "reasoning_content") == "thinking é漢"
    reasoning = [d["reasoning_content"] for d in _deltas(frames) if "reasoning_content" in d]
    assert reasoning[-1] == ""
    assert "" not in reasoning[:-1]
    assert _joined(frames, "content") == "Let me look."
    _check_calls(_deltas(frames))
    assert end["choices"][0]["delta"] == {}
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["choices"] == []
    assert usage["usage"] == end["choices"][0]["usage"]


def _check_calls(deltas: list[dict[str, Any]]) -> None:
    pieces = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    arguments = {0: "", 1: ""}
    for position, piece in enumerate(pieces):
        index = piece["index"]
        is_first = all(earlier["index"] != index for earlier in pieces[:position])
        if is_first:
            assert set(piece) == {"index", "id", "type", "function"}
            assert piece["id"] == f"get_weather_{index}"
            assert piece["type"] == "function"
            assert piece["function"] == {"name": "get_weather", "arguments": ""}
        else:
            assert set(piece) == {"index", "function"}
            assert set(piece["function"]) == {"arguments"}
        arguments[index] += piece["function"]["arguments"]
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    assert json.loads(arguments[0]) == {"city": "Oslo"}
    assert json.loads(arguments[1]) == {"city": 'a "b"\n'}
    assert len(pieces) > 4


def test_long_arguments_come_in_many_pieces_or_in_one() -> None:
    reply = answer("", "", call("get_weather", city="x" * 400))
    for tool_stream, is_incremental in (("incremental", True), ("atomic", False)):
        with serving(reply, tool_stream=tool_stream) as running:
            frames = running.frames(tools=[WEATHER])
        pieces = [
            delta["tool_calls"][0]["function"]["arguments"]
            for delta in _deltas(frames)
            if "tool_calls" in delta
        ]
        shown = [piece for piece in pieces if piece]
        assert json.loads("".join(pieces)) == {"city": "x" * 400}
        assert (len(shown) > 1) is is_incremental


def test_usage_frame_only_when_asked() -> None:
    with serving(answer("t", "ok")) as running:
        plain = running.frames()
        assert all(frame == "[DONE]" or frame["choices"] for frame in plain)
        assert all("usage" not in frame for frame in plain if frame != "[DONE]")
        continuous = running.frames(stream_options={"continuous_usage_stats": True})
    counts = [frame["usage"]["completion_tokens"] for frame in continuous[1:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == len(answer("t", "ok")) + 1


def test_internal_content_carries_the_generated_ids() -> None:
    with serving(answer("t", "ok")) as running:
        frames = running.frames(stream_options={"include_internal_content": True})
    ids = [
        id
        for delta in _deltas(frames)
        if "internal_content" in delta
        for id in delta["internal_content"]["token_ids"]
    ]
    generated = answer("t", "ok")
    # a frame of several steps may carry ids beyond the last visible letter, the stop id included
    assert ids == [*generated, END][: len(ids)]
    last_letter = len(generated) - generated[::-1].index(ids_of("k")[0])
    assert len(ids) >= last_letter


@pytest.mark.parametrize("stop", ["END", ["nope", "END"]])
def test_stop_strings_end_the_content_only(stop: str | list[str]) -> None:
    reply = answer("END of thought", "one two END three")
    with serving(reply) as running:
        frames = running.frames(stop=stop)
        whole = running.chat(stop=stop).json()["choices"][0]
    assert _joined(frames, "reasoning_content") == "END of thought"
    assert _joined(frames, "content") == "one two "
    assert frames[-2]["choices"][0]["finish_reason"] == "stop"
    assert whole["message"]["content"] == "one two "
    assert whole["message"]["reasoning_content"] == "END of thought"
    assert whole["finish_reason"] == "stop"


def test_a_stop_string_ends_the_generation() -> None:
    reply = answer("", "aSTOP" + "b" * 1500)
    with serving(reply) as running:
        assert running.chat(stop="STOP").json()["choices"][0]["message"]["content"] == "a"
        running.engine.check()
        assert running.engine.stats().num_aborted == 1
        assert running.engine.stats().num_generated_tokens < 1000


def test_a_skipped_think_channel_becomes_content_at_the_end() -> None:
    reply = ids_of("Hello<|close|>response<|sep|><|close|>message<|sep|>")
    with serving(reply) as running:
        frames = running.frames()
        message = running.chat().json()["choices"][0]["message"]
    assert _joined(frames, "content") == "Hello"
    assert message["content"] == "Hello"
    assert message["reasoning_content"] == ""


def test_multi_byte_characters_never_break() -> None:
    text = "héllo 漢字 🌤"
    with serving(answer(text, text)) as running:
        response = running.chat(stream=True)
    assert "\ufffd" not in response.content.decode("utf-8")


def test_a_failure_in_mid_stream_is_an_error_frame_without_done() -> None:
    reply = answer("t", "some content")
    script = reply_with(reply, END)

    def failing(prompt: Any, output: Any) -> Any:
        if len(output) == len(reply) - 20:
            raise RuntimeError("boom")
        return script(prompt, output)

    with serving(ScriptedModel(failing)) as running:
        frames = running.frames()
        assert running.chat().status_code == 500
        assert running.get("/health").status_code == 200
    assert frames[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in frames
    assert "choices" in frames[-2]


def test_streams_and_whole_replies_agree_on_logprobs() -> None:
    reply = answer("t", "ok")
    with serving(reply) as running:
        frames = running.frames(logprobs=True, top_logprobs=2)
        whole = running.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    streamed = [
        entry
        for frame in frames[:-1]
        for entry in (frame["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    entries = whole["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [TOKENIZER.name(id) for id in [*reply, END]]
    assert streamed == entries
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 2
