"""The HTTP body decides the same prompt as the published request mappings."""

import asyncio
import json
from typing import Any

import pytest

from moonlet.chat import Tokenizer
from moonlet.chat.special_tokens import k3_table
from moonlet.chat.vocabulary import read_ranks
from moonlet.core.errors import RequestError
from moonlet.serve.body import validated
from moonlet.serve.openai.prompts import STUB_TOKENS, encode_chat, thinking_of
from moonlet.serve.openai.refusals import check_chat
from moonlet.serve.openai.schema import ChatRequest
from tests.golden_data import count_vectors, golden_dir, require


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    ranks = read_ranks(require(golden_dir("chat") / "tiktoken.model"))
    return Tokenizer(ranks, k3_table(len(ranks)))


def _vectors() -> list[dict[str, Any]]:
    path = require(golden_dir("chat") / "render.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _encode(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    request = validated(ChatRequest, body)
    check_chat(request, body)
    return asyncio.run(encode_chat(request, body, tokenizer, "error")).ids


def _is_built(vector: dict[str, Any]) -> bool:
    extra = vector["http_extra"]
    choice = extra.get("tool_choice")
    rendered_only = choice == "required" or isinstance(choice, dict)
    wants_json = extra.get("response_format", {}).get("type", "text") != "text"
    return not (rendered_only or wants_json)


def _names_calls_by_position(vector: dict[str, Any]) -> bool:
    calls = [call for m in vector["messages"] for call in m.get("tool_calls") or ()]
    aliases = {
        f"{call['function']['name']}:{position}"
        for position, call in enumerate(calls)
        if "id" not in call
    }
    return any(m.get("tool_call_id") in aliases for m in vector["messages"])


def test_bodies_give_the_published_prompts(tokenizer: Tokenizer) -> None:
    num_compared = num_unbuilt = 0
    for vector in _vectors():
        if "http_extra" not in vector:
            continue
        body = {"model": "m", "messages": vector["messages"], **vector["http_extra"]}
        expected = vector["expected"]
        name = vector["id"]
        if "error" in expected:
            with pytest.raises(RequestError):
                _encode(body, tokenizer)
        elif not vector["messages"]:
            # the encoder renders an empty conversation, the HTTP surface refuses it
            with pytest.raises(RequestError, match="messages"):
                _encode(body, tokenizer)
        elif not _is_built(vector):
            with pytest.raises(RequestError) as caught:
                _encode(body, tokenizer)
            assert caught.value.code == "unsupported", name
            num_unbuilt += 1
        elif _names_calls_by_position(vector):
            # the alias rule comes before the encoder, whose own result has the results swapped
            assert tokenizer.decode(_encode(body, tokenizer)) == vector["peers_differ"]["vllm"]
        else:
            ids = _encode(body, tokenizer)
            assert ids == expected["token_ids"], name
            assert len(ids) - STUB_TOKENS == expected["usage_prompt_tokens"], name
        num_compared += 1
    assert num_compared > num_unbuilt > 0
    count_vectors(num_compared)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, "max")),
        ({"reasoning_effort": "low"}, (True, "low")),
        ({"reasoning_effort": "none"}, (False, None)),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, (False, None)),
        ({"thinking": {}}, (True, "max")),
        ({"thinking": {"type": "enabled", "keep": "all", "effort": "low"}}, (True, "low")),
        ({"thinking": {"effort": "low"}, "reasoning_effort": "high"}, (True, "low")),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, (True, "max")),
        ({"chat_template_kwargs": {"thinking": False}}, (False, None)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, (False, None)),
        (
            {"chat_template_kwargs": {"thinking_effort": "high"}, "reasoning_effort": "low"},
            (True, "high"),
        ),
        (
            {"chat_template_kwargs": {"thinking_effort": "high"}, "thinking": {"effort": "low"}},
            (True, "low"),
        ),
        ({"chat_template_kwargs": {"preserve_thinking": False}}, (True, "max")),
        ({"reasoning_effort": "medium", "thinking": {"type": "disabled"}}, (False, None)),
    ],
)
def test_thinking_controls_follow_their_precedence(
    fields: dict[str, Any], expected: tuple[bool, str | None]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    choice = thinking_of(validated(ChatRequest, body), "error")
    assert (choice.is_on, choice.effort) == expected


@pytest.mark.parametrize(
    ("effort", "nearest"), [("minimal", "low"), ("medium", "high"), ("xhigh", "max")]
)
def test_unknown_efforts_are_refused_or_mapped(effort: str, nearest: str) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "reasoning_effort": effort,
    }
    request = validated(ChatRequest, body)
    with pytest.raises(RequestError) as caught:
        thinking_of(request, "error")
    assert caught.value.param == "reasoning_effort"
    assert thinking_of(request, "nearest").effort == nearest
    unknown = validated(ChatRequest, {**body, "reasoning_effort": "quite a lot"})
    with pytest.raises(RequestError):
        thinking_of(unknown, "nearest")
