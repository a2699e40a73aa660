"""Everything a request can get wrong is answered 4xx, with the field path, before any compute."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonlet.core.errors import RequestError
from moonlet.serve.body import parse_json, validated
from moonlet.serve.openai.prompts import encode_chat
from moonlet.serve.openai.refusals import check_chat
from moonlet.serve.openai.schema import ChatRequest, Message
from tests.serve.running import (
    MODEL,
    TOKENIZER,
    USER,
    WEATHER,
    Running,
    answer,
    error_of,
    serving,
)

CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    ],
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(answer("t", "ok"), max_model_len=600, max_body_bytes=20_000) as running:
        yield running


def _message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*USER, fields]}


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    (_message(role="narrator", content="x"), "messages[1].role"),
    (_message(content="x"), "messages[1].role"),
    (_message(role="user", content=5), "messages[1].content"),
    (_message(role="user", content=[{"type": "text"}]), "messages[1].content[0].text"),
    (_message(role="user", content=[{"type": "video_url"}]), "messages[1].content[0].type"),
    (_message(role="user", content=["x"]), "messages[1].content[0]"),
    (_message(role="user", content="x", name=7), "messages[1].name"),
    (_message(role="tool", content="x"), "messages[1].tool_call_id"),
    (_message(role="tool", content="x", tool_call_id=""), "messages[1].tool_call_id"),
    (_message(role="tool", content="x", tool_call_id=3), "messages[1].tool_call_id"),
    (_message(role="tool", content="x", tool_call_id="q"), "messages[1].tool_call_id"),
    (_message(role="user", content="x", tools=[WEATHER]), "messages[1].tools"),
    (_message(role="system", content="x", tools=[WEATHER]), "messages[1].content"),
    (_message(role="user", content="x", tool_calls=[]) | {"tools": 3}, "tools"),
    (_message(**{**CALLING, "role": "user"}), "messages[1].tool_calls"),
    (_message(role="assistant", tool_calls=[{"id": "x"}]), "messages[1].tool_calls[0].function"),
    (
        _message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (_message(role="user", content="x", partial=True), "messages[1].partial"),
    (
        {"messages": [{"role": "assistant", "content": "x", "partial": True}, *USER]},
        "messages[0].partial",
    ),
    ({"tools": "f"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [WEATHER] * 129}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice.function.name"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": "text"}, "response_format"),
    ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"effort": "none"}}, "thinking.effort"),
    ({"thinking": True}, "thinking"),
    ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": "7"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 2.0}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ({"max_completion_tokens": 10_000, "max_tokens": 1}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": "2"}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 7}, "stop"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), MALFORMED, ids=lambda value: json.dumps(value)[:60])
def test_malformed_chat_bodies_name_the_field(
    running: Running, fields: dict[str, Any], param: str
) -> None:
    before = running.engine.stats()
    error = error_of(running.chat(**fields))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert running.engine.stats() == before


def test_stop_strings_are_bounded_together() -> None:
    # building the matchers takes time in proportion, on the thread that serves everybody
    body = {"model": MODEL, "messages": USER, "stop": ["a" * 32_768] * 2}
    check_chat(validated(ChatRequest, body), body)
    longer = {**body, "stop": [*body["stop"], "b"]}
    with pytest.raises(RequestError, match="65537 characters") as caught:
        check_chat(validated(ChatRequest, longer), longer)
    assert caught.value.param == "stop"


def test_another_spelling_of_a_path_is_no_redirect(running: Running) -> None:
    response = running.post("/v1/chat/completions/", {"model": MODEL, "messages": USER})
    assert error_of(response, 404)["type"] == "resource_not_found_error"


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required", "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": NAMED, "tools": [WEATHER]}, "tool_choice"),
    (
        {
            "tool_choice": "required",
            "messages": [{"role": "system", "tools": [WEATHER]}, *USER],
        },
        "tool_choice",
    ),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"response_format": SCHEMA}, "response_format.type"),
    ({"n": 2}, "n"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias"),
    ({"min_tokens": 1}, "min_tokens"),
    (_message(role="assistant", content="x", partial=True), "messages[1].partial"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    (_message(role="user", content=IMAGE), "messages[1].content[0]"),
    ({"thinking_token_budget": 10}, "thinking_token_budget"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED, ids=lambda value: json.dumps(value)[:60])
def test_known_fields_that_are_not_built_say_so(
    running: Running, fields: dict[str, Any], param: str
) -> None:
    error = error_of(running.chat(**fields))
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "unsupported"
    assert error["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"some_new_field": {"a": 1}},
        {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "metadata": {"a": "b"}},
        {"n": 1, "logit_bias": {}, "min_tokens": 0, "response_format": {"type": "text"}},
        {"tools": None, "tool_choice": None, "stop": None, "seed": None, "logprobs": None},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"anyOf": [{"type": "object"}, {"type": "object"}]},
                    },
                }
            ]
        },
        {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": None}]},
        {"messages": [*USER, {**CALLING, "reasoning_content": ""}]},
        {"messages": [*USER, {**CALLING, "reasoning_content": None}]},
        {"messages": [*USER, CALLING, {"role": "tool", "tool_call_id": "x", "content": "1"}]},
        {"temperature": 0, "top_p": 1, "top_k": -1, "seed": -(2**63)},
        {"thinking": {"type": "disabled"}, "reasoning_effort": "whatever"},
    ],
)
def test_harmless_fields_are_accepted(running: Running, fields: dict[str, Any]) -> None:
    assert running.chat(**fields).status_code == 200


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b'{"model": Infinity}', "invalid_json"),
        (b'{"temperature": 1e999}', "invalid_json"),
        (b'{"a": "\\ud800"}', "invalid_json"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "invalid_json"),
        (b"[" * 15_000, "invalid_json"),
        (b'{"model": "\xff\xfe"}', "invalid_utf8"),
        (b"[]", None),
        (b'"text"', None),
        (b"null", None),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_bodies_that_are_no_json_object(
    running: Running, path: str, content: bytes, code: str | None
) -> None:
    assert error_of(running.post(path, content=content))["code"] == code


def test_too_large_bodies_are_refused_with_and_without_a_declared_length(running: Running) -> None:
    content = json.dumps({"model": MODEL, "messages": USER, "x": "y" * 20_000}).encode()
    path = "/v1/chat/completions"
    assert error_of(running.post(path, content=content), 413)["type"] == "request_too_large"
    pieces = (content[start : start + 1000] for start in range(0, len(content), 1000))
    assert error_of(running.post(path, content=pieces), 413)["type"] == "request_too_large"


def test_too_long_prompts_name_both_lengths(running: Running) -> None:
    error = error_of(running.chat(messages=[{"role": "user", "content": "x" * 700}]))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "600" in error["message"]
    count = running.post("/tokenize", {"messages": [{"role": "user", "content": "x" * 700}]})
    assert str(count.json()["count"]) in error["message"]
    error = error_of(running.post("/v1/completions", {"model": MODEL, "prompt": "x" * 600}))
    assert error["param"] == "prompt"
    over = {"model": MODEL, "prompt": "x" * 500, "max_tokens": 101}
    error = error_of(running.post("/v1/completions", over))
    assert error["param"] == "max_tokens"
    assert "500" in error["message"]
    assert "600" in error["message"]
    assert running.post("/v1/completions", {**over, "max_tokens": 100}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": ["a"] * 65}, "prompt"),
    ],
)
def test_malformed_completion_bodies(running: Running, fields: dict[str, Any], param: str) -> None:
    error = error_of(running.post("/v1/completions", {"model": MODEL, **fields}))
    assert error["param"].split("[")[0] == param.split("[")[0]


def test_unknown_models_paths_and_methods(running: Running) -> None:
    for response in (
        running.chat(model="gpt-4"),
        running.post("/v1/completions", {"model": "gpt-4", "prompt": "a"}),
        running.get("/v1/models/gpt-4"),
    ):
        error = error_of(response, 404)
        assert error["type"] == "resource_not_found_error"
        assert error["code"] == "model_not_found"
        assert MODEL in error["message"]
    assert error_of(running.get("/v1/nothing"), 404)["type"] == "resource_not_found_error"
    response = running.get("/v1/chat/completions")
    assert error_of(response, 405)["type"] == "invalid_request_error"
    assert response.headers["allow"] == "POST"


def test_unanswered_tool_ids_name_message_and_known_ids(running: Running) -> None:
    messages = [*USER, CALLING, {"role": "tool", "tool_call_id": "", "content": "ok"}]
    error = error_of(running.chat(messages=messages))
    assert error["param"] == "messages[2].tool_call_id"
    assert "x" in error["message"].split(":")[-1]


def test_the_sdk_raises_its_own_errors(running: Running) -> None:
    client = running.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[], temperature=0)
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])


def test_deep_values_are_refused_not_crashed_on(running: Running) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    for field in ("temperature", "messages", "tools", "stop", "metadata"):
        assert running.chat(**{field: deep}).status_code in (200, 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [*ChatRequest.model_fields, "audio", "unknown"]


def _prompt_ids(body: ChatRequest, raw: dict[str, Any]) -> list[int]:
    """Run the coroutine without an event loop: a short prompt never waits."""
    encoding = encode_chat(body, raw, TOKENIZER, "error")
    with pytest.raises(StopIteration) as done:
        encoding.send(None)
    return done.value.value.ids


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
def test_no_json_body_gets_past_the_checks_or_breaks_them(
    fields: dict[str, Any], is_complete: bool
) -> None:
    raw = {"model": MODEL, "messages": USER, **fields} if is_complete else fields
    with contextlib.suppress(RequestError):
        body = validated(ChatRequest, parse_json(json.dumps(raw).encode()))
        check_chat(body, raw)
        assert isinstance(_prompt_ids(body, raw), list)


@given(st.dictionaries(st.sampled_from([*Message.model_fields, "x"]), JSON, max_size=5))
def test_no_message_breaks_the_checks(fields: dict[str, Any]) -> None:
    raw = {"model": MODEL, "messages": [*USER, {"role": "assistant", **fields}]}
    with contextlib.suppress(RequestError):
        body = validated(ChatRequest, raw)
        check_chat(body, raw)
        assert isinstance(_prompt_ids(body, raw), list)
