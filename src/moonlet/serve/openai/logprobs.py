"""Log probabilities in the two OpenAI shapes (chat-protocol.md section 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonlet.chat.tokenizer import Tokenizer
from moonlet.engine.request import TokenLogprobs

__all__ = ["chat_logprobs", "completion_logprobs"]


def chat_logprobs(
    tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer, num_top: int
) -> list[dict[str, Any]]:
    """Return entries of ``choices[].logprobs.content``: one per generated id, markup included."""
    return [
        {
            **_entry(token.id, token.logprob, tokenizer),
            "top_logprobs": [_entry(id, logprob, tokenizer) for id, logprob in token.top[:num_top]],
        }
        for token in tokens
    ]


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer, text_offset: int
) -> dict[str, Any]:
    """Return the ``logprobs`` object of a raw completion.

    Args:
        tokens: Generated tokens.
        tokenizer: Names the tokens.
        text_offset: Characters of text before these tokens.
    """
    names = [tokenizer.name(token.id) for token in tokens]
    offsets: list[int] = []
    for name in names:
        offsets.append(text_offset)
        text_offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {tokenizer.name(id): logprob for id, logprob in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }


def _entry(id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(id)
    return {"token": tokenizer.name(id), "logprob": logprob, "bytes": list(raw)}
