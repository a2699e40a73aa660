"""Sampling parameters of a request: its own fields over the checkpoint's defaults."""

from __future__ import annotations

from typing import TypeVar

from moonlet.core.errors import RequestError
from moonlet.engine.request import SamplingParams
from moonlet.serve.openai.schema import SamplingFields
from moonlet.serve.settings import MAX_OUTPUT_TOKENS, GenerationDefaults

__all__ = ["check_token_ids", "output_limit", "sampling_params"]

NumberT = TypeVar("NumberT", int, float)


def output_limit(explicit: int | None, num_prompt: int, max_model_len: int) -> int:
    """Return how many tokens may be generated: the explicit limit, else what the context leaves."""
    if explicit is not None:
        return explicit
    return min(MAX_OUTPUT_TOKENS, max_model_len - num_prompt)


def sampling_params(
    body: SamplingFields,
    defaults: GenerationDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """Translate a body's sampling fields.

    Args:
        body: The checked body.
        defaults: The checkpoint's ``generation_config.json``.
        max_tokens: Output limit, see `output_limit`.
        logprobs: Alternatives to report per token, None for no log probabilities.
        vocab_size: Bounds ``stop_token_ids``.

    Raises:
        RequestError: A stop id is outside the vocabulary.
    """
    stop_ids = frozenset(body.stop_token_ids or ())
    check_token_ids(stop_ids, vocab_size, "stop_token_ids")
    return SamplingParams(
        temperature=_first(body.temperature, defaults.temperature),
        top_p=_first(body.top_p, defaults.top_p),
        top_k=_first(body.top_k, defaults.top_k),
        min_p=_first(body.min_p, 0.0),
        seed=body.seed,
        presence_penalty=_first(body.presence_penalty, 0.0),
        frequency_penalty=_first(body.frequency_penalty, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty),
        max_tokens=max_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def check_token_ids(ids: frozenset[int] | list[int], vocab_size: int, param: str) -> None:
    """Check that ids lie in the vocabulary.

    Raises:
        RequestError: One does not.
    """
    for id in ids:
        if id >= vocab_size:
            raise RequestError(
                f"{param} has {id}, outside the vocabulary of {vocab_size} tokens", param=param
            )


def _first(value: NumberT | None, default: NumberT) -> NumberT:
    return default if value is None else value
