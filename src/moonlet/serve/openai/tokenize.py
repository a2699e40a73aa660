"""``POST /tokenize`` and ``/detokenize``: what a prompt costs, without running it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from moonlet.core.errors import RequestError
from moonlet.serve.body import read_body, validated
from moonlet.serve.openai.prompts import encode_chat, encode_text
from moonlet.serve.openai.refusals import check_prompt
from moonlet.serve.openai.sampling import check_token_ids
from moonlet.serve.openai.schema import DetokenizeRequest, TokenizeRequest
from moonlet.serve.service import service_of

__all__ = ["router"]

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Return the ids of a raw prompt, or of a conversation as chat would render it."""
    service = service_of(request)
    raw = await read_body(request, service.config)
    body = validated(TokenizeRequest, raw)
    if body.model is not None:
        service.check_model(body.model)
    if (body.prompt is None) == (not body.messages):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        ids = await encode_text(body.prompt, service.tokenizer)
    else:
        check_prompt(body)
        service.check_can_chat()
        fallback = service.config.effort_fallback
        ids = (await encode_chat(body, raw, service.tokenizer, fallback)).ids
    return {"tokens": ids, "count": len(ids), "max_model_len": service.config.max_model_len}


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    """Return the text of ids, control tokens by name."""
    service = service_of(request)
    raw = await read_body(request, service.config)
    body = validated(DetokenizeRequest, raw)
    if body.model is not None:
        service.check_model(body.model)
    check_token_ids(body.tokens, service.tokenizer.vocab_size, "tokens")
    return {"prompt": service.tokenizer.decode(body.tokens)}
