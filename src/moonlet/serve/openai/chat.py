"""``POST /v1/chat/completions``: check, render, submit, answer (chat-protocol.md section 6)."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from moonlet.chat.call_ids import count_tool_calls
from moonlet.chat.events import Event
from moonlet.engine.request import EngineRequest, TokenOutput
from moonlet.serve.auth import cache_salt
from moonlet.serve.body import read_body, validated
from moonlet.serve.disconnect import aborting_on_disconnect, briefly_until_admitted
from moonlet.serve.errors import engine_failure
from moonlet.serve.openai.choice import ChatChoice, ChoiceOptions
from moonlet.serve.openai.frames import ChatFrames
from moonlet.serve.openai.logprobs import chat_logprobs
from moonlet.serve.openai.prompts import STUB_TOKENS, ChatPrompt, check_length, encode_chat
from moonlet.serve.openai.refusals import check_chat, has_tools
from moonlet.serve.openai.sampling import output_limit, sampling_params
from moonlet.serve.openai.schema import ChatRequest, StreamOptions
from moonlet.serve.openai.usage import Usage
from moonlet.serve.service import Service, service_of
from moonlet.serve.streaming import EventStream

if TYPE_CHECKING:
    from moonlet.engine.engine import RequestHandle

__all__ = ["router"]

router = APIRouter()


@dataclass(slots=True)
class _Reply:
    """One chat reply in the making."""

    id: str
    created: int
    body: ChatRequest
    service: Service
    choice: ChatChoice
    num_prompt: int
    handle: RequestHandle

    def usage(self) -> Usage:
        cached, counted = self.handle.num_cached_tokens, self.num_prompt - STUB_TOKENS
        return Usage(
            prompt_tokens=counted,
            completion_tokens=self.choice.num_tokens,
            reasoning_tokens=self.choice.reasoning_tokens,
            cached_tokens=None if cached is None else min(cached, counted),
        )

    def logprobs(self, output: TokenOutput) -> list[dict[str, Any]]:
        tokenizer = self.service.tokenizer
        return chat_logprobs(output.logprobs or (), tokenizer, self.body.top_logprobs or 0)

    def take(self, output: TokenOutput) -> list[Event]:
        """Feed one engine output to the choice; end the generation when the message is over."""
        if output.finish in ("error", "abort"):
            raise engine_failure(output.finish, output.error)
        events = self.choice.feed(output.ids)
        if output.finish is not None:
            events += self.choice.finish(output.finish)
        elif self.choice.is_over:
            self.abort()
        return events

    def check_over(self) -> None:
        """Raise if the engine's stream ended before the message did."""
        if not self.choice.is_over:
            raise engine_failure("abort")

    def abort(self) -> None:
        self.service.engine.abort(self.id)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer one chat request, whole or streamed."""
    service = service_of(request)
    with ExitStack() as place:
        place.enter_context(service.admitted())
        raw = await read_body(request, service.config)
        body = validated(ChatRequest, raw)
        service.check_model(body.model)
        check_chat(body, raw)
        service.check_can_chat()
        prompt = await encode_chat(body, raw, service.tokenizer, service.config.effort_fallback)
        reply = _submit(service, body, raw, prompt, cache_salt(request, body.cache_salt))
        async with aborting_on_disconnect(request.receive, reply.abort):
            if not body.stream:
                message = orjson.dumps(await _collect(reply))
                headers = reply.usage().headers()
                return Response(message, headers=headers, media_type="application/json")
            await briefly_until_admitted([reply.handle])
            headers = reply.usage().headers()
        release: Callable[[], None] = place.pop_all().close
    return EventStream(_frames(reply), abort=reply.abort, release=release, headers=headers)


def _submit(
    service: Service, body: ChatRequest, raw: Mapping[str, Any], prompt: ChatPrompt, salt: str
) -> _Reply:
    """Check the lengths and hand the prompt to the engine."""
    config = service.config
    num_prompt = len(prompt.ids)
    check_length(
        num_prompt,
        body.output_limit,
        config.max_model_len,
        prompt_field="messages",
        limit_field=body.limit_field,
    )
    sampling = sampling_params(
        body,
        config.defaults,
        max_tokens=output_limit(body.output_limit, num_prompt, config.max_model_len),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        vocab_size=service.tokenizer.vocab_size,
    )
    options = ChoiceOptions(
        thinking=prompt.thinking,
        keep_calls=body.tool_choice != "none" and has_tools(body),
        one_call=body.parallel_tool_calls is False,
        show_reasoning=body.include_reasoning is not False,
        stop=tuple(body.stop_strings),
        tool_stream=config.tool_stream,
        num_history_calls=count_tool_calls(raw["messages"]),
        call_ids=config.tool_call_ids,
    )
    reply_id = f"chatcmpl-{uuid.uuid4().hex[:24]}"
    choice = ChatChoice(service.tokenizer, options)
    submitted = EngineRequest(
        request_id=reply_id, prompt_ids=prompt.ids, sampling=sampling, cache_salt=salt
    )
    handle = service.engine.submit(submitted)
    return _Reply(reply_id, int(time.time()), body, service, choice, num_prompt, handle)


async def _collect(reply: _Reply) -> dict[str, Any]:
    """Run a reply to its end and return the response body."""
    choice = reply.choice
    logprobs: list[dict[str, Any]] = []
    async for output in reply.handle.aiter():
        reply.take(output)
        logprobs += reply.logprobs(output)
        if choice.is_over:
            break
    reply.check_over()
    entry = {
        "index": 0,
        "message": choice.message(),
        "finish_reason": choice.finish_reason,
        "logprobs": {"content": logprobs} if reply.body.logprobs else None,
    }
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.service.config.model_name,
        "choices": [entry],
        "usage": reply.usage().to_json(),
    }


async def _frames(reply: _Reply) -> AsyncIterator[bytes]:
    """Run a reply and yield its frames."""
    choice = reply.choice
    options = reply.body.stream_options or StreamOptions()
    frames = ChatFrames(reply.id, reply.created, reply.service.config.model_name, options)
    yield frames.role()
    ids: list[int] = []
    logprobs: list[dict[str, Any]] | None = [] if reply.body.logprobs else None
    async for output in reply.handle.aiter():
        events = reply.take(output)
        ids += output.ids
        if logprobs is not None:
            logprobs += reply.logprobs(output)
        for event in events:
            usage = reply.usage() if options.continuous_usage_stats else None
            chunk = frames.increment(event, choice, usage, ids=ids, logprobs=logprobs)
            if chunk is not None:
                yield chunk
                ids.clear()
                logprobs = None if logprobs is None else []
        if choice.is_over:
            break
    reply.check_over()
    yield frames.end(choice.finish_reason, reply.usage(), logprobs)
    last = frames.usage(reply.usage())
    if last is not None:
        yield last
