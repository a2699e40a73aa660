"""``POST /v1/completions``: raw prompts without a template (chat-protocol.md section 6.1)."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from moonlet.core.errors import RequestError
from moonlet.engine.request import EngineRequest, SamplingParams, TokenLogprobs
from moonlet.serve.auth import cache_salt
from moonlet.serve.body import read_body, validated
from moonlet.serve.disconnect import aborting_on_disconnect, briefly_until_admitted
from moonlet.serve.errors import engine_failure
from moonlet.serve.merging import merged
from moonlet.serve.openai.logprobs import completion_logprobs
from moonlet.serve.openai.prompts import check_length, encode_text
from moonlet.serve.openai.refusals import check_completion
from moonlet.serve.openai.sampling import check_token_ids, sampling_params
from moonlet.serve.openai.schema import CompletionRequest, StreamOptions
from moonlet.serve.openai.text_choice import TextChoice
from moonlet.serve.openai.usage import Usage
from moonlet.serve.service import Service, service_of
from moonlet.serve.streaming import EventStream, frame

if TYPE_CHECKING:
    from moonlet.engine.engine import RequestHandle

__all__ = ["router"]

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64


@dataclass(slots=True)
class _Run:
    """One prompt of a request and its continuation."""

    id: str
    index: int
    prompt_ids: list[int]
    choice: TextChoice
    handle: RequestHandle


@dataclass(slots=True)
class _Reply:
    """The reply to one request: a choice per prompt."""

    id: str
    created: int
    body: CompletionRequest
    service: Service
    runs: list[_Run]

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(run.prompt_ids) for run in self.runs),
            completion_tokens=sum(run.choice.num_tokens for run in self.runs),
            cached_tokens=self._cached_tokens(),
        )

    def _cached_tokens(self) -> int | None:
        counts = [run.handle.num_cached_tokens for run in self.runs]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.config.model_name,
        }

    def abort(self) -> None:
        for run in self.runs:
            self.service.engine.abort(run.id)


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue one or more raw prompts, whole or streamed."""
    service = service_of(request)
    with ExitStack() as place:
        place.enter_context(service.admitted())
        raw = await read_body(request, service.config)
        body = validated(CompletionRequest, raw)
        service.check_model(body.model)
        check_completion(body, raw)
        prompts = await _encode_prompts(body, service)
        reply = _submit(service, body, prompts, cache_salt(request, body.cache_salt))
        async with aborting_on_disconnect(request.receive, reply.abort):
            if not body.stream:
                answer = orjson.dumps(await _collect(reply))
                headers = reply.usage().headers()
                return Response(answer, headers=headers, media_type="application/json")
            await briefly_until_admitted([run.handle for run in reply.runs])
            headers = reply.usage().headers()
        release = place.pop_all().close
    return EventStream(_frames(reply), abort=reply.abort, release=release, headers=headers)


async def _encode_prompts(body: CompletionRequest, service: Service) -> list[list[int]]:
    """Return the ids of every prompt of a body."""
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [await encode_text(prompt, service.tokenizer)]
    if isinstance(prompt[0], int):
        prompt = [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"{len(prompt)} prompts; at most {MAX_PROMPTS} go in one request", param="prompt"
        )
    encoded: list[list[int]] = []
    for index, entry in enumerate(prompt):
        if not entry:
            raise RequestError(f"prompt[{index}] is empty", param=f"prompt[{index}]")
        if isinstance(entry, str):
            encoded.append(await encode_text(entry, service.tokenizer))
        else:
            check_token_ids(entry, service.tokenizer.vocab_size, "prompt")
            encoded.append(entry)
    return encoded


def _submit(
    service: Service, body: CompletionRequest, prompts: list[list[int]], salt: str
) -> _Reply:
    """Check every prompt, then hand all of them to the engine."""
    config = service.config
    samplings: list[SamplingParams] = []
    for ids in prompts:
        check_length(
            len(ids),
            body.max_tokens,
            config.max_model_len,
            prompt_field="prompt",
            limit_field="max_tokens",
        )
        room = config.max_model_len - len(ids)
        sampling = sampling_params(
            body,
            config.defaults,
            max_tokens=body.max_tokens or min(DEFAULT_MAX_TOKENS, room),
            logprobs=body.logprobs,
            vocab_size=service.tokenizer.vocab_size,
        )
        samplings.append(sampling)
    reply = _Reply(f"cmpl-{uuid.uuid4().hex[:24]}", int(time.time()), body, service, [])
    for index, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        run_id = f"{reply.id}-{index}"
        choice = TextChoice(
            service.tokenizer,
            body.stop_strings,
            skip_special=bool(body.skip_special_tokens),
        )
        request = EngineRequest(
            request_id=run_id, prompt_ids=ids, sampling=sampling, cache_salt=salt
        )
        try:
            handle = service.engine.submit(request)
        except Exception:
            reply.abort()
            raise
        reply.runs.append(_Run(run_id, index, ids, choice, handle))
    return reply


async def _pieces(reply: _Reply, run: _Run) -> AsyncIterator[dict[str, Any]]:
    """Run one prompt; yield the choice objects of its frames, the last with the reason."""
    choice = run.choice
    tokenizer = reply.service.tokenizer
    tokens: list[TokenLogprobs] = []
    offset = 0
    async for output in run.handle.aiter():
        if output.finish in ("error", "abort"):
            raise engine_failure(output.finish, output.error)
        text = choice.feed(output.ids, output.finish)
        tokens += output.logprobs or ()
        if choice.is_over and output.finish is None:
            reply.service.engine.abort(run.id)
        if not text and not choice.is_over:
            continue
        logprobs = None
        if reply.body.logprobs is not None:
            logprobs = completion_logprobs(tokens, tokenizer, offset)
            offset += sum(len(name) for name in logprobs["tokens"])
            tokens = []
        yield {
            "index": run.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        if choice.is_over:
            return
    raise engine_failure("abort")


async def _collect(reply: _Reply) -> dict[str, Any]:
    """Run all prompts to their end and return the response body."""

    async def whole(run: _Run) -> dict[str, Any]:
        pieces = [piece async for piece in _pieces(reply, run)]
        logprobs = None
        if reply.body.logprobs is not None:
            keys = pieces[-1]["logprobs"]
            logprobs = {
                key: [e for piece in pieces for e in piece["logprobs"][key]] for key in keys
            }
        text = "".join(piece["text"] for piece in pieces)
        return {**pieces[-1], "text": text, "logprobs": logprobs}

    choices = await asyncio.gather(*(whole(run) for run in reply.runs))
    return {**reply.head(), "choices": choices, "usage": reply.usage().to_json()}


async def _frames(reply: _Reply) -> AsyncIterator[bytes]:
    """Run all prompts and yield their frames as they come."""
    options = reply.body.stream_options or StreamOptions()
    async for piece in merged([_pieces(reply, run) for run in reply.runs]):
        chunk = {**reply.head(), "choices": [piece]}
        if options.continuous_usage_stats:
            chunk["usage"] = reply.usage().to_json()
        yield frame(chunk)
    if options.include_usage:
        yield frame({**reply.head(), "choices": [], "usage": reply.usage().to_json()})
