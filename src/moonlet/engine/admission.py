"""What a request may ask of this engine; everything is checked before it is queued."""

from __future__ import annotations

import secrets
import time
from typing import Literal

from moonlet.core.errors import PromptTooLong, RequestError
from moonlet.engine.cache.manager import CacheManager
from moonlet.engine.limits import SchedulerLimits
from moonlet.engine.request import EngineRequest, Sequence

__all__ = ["check_request", "new_sequence", "refusal"]


def check_request(
    request: EngineRequest, limits: SchedulerLimits, manager: CacheManager, vocab_size: int
) -> int:
    """Refuse what can never run and return the rank of the request's priority class.

    Raises:
        PromptTooLong: Prompt, or prompt plus explicit ``max_tokens``, exceeds the context.
        RequestError: An id outside the vocabulary, an unknown class, or a prompt beyond the
            budgets of its class.
    """
    limit, length = limits.max_model_len, len(request.prompt_ids)
    explicit = request.sampling.max_tokens
    if length + (explicit or 1) > limit:
        wanted = f"max_tokens {explicit}" if explicit else "one token of output"
        raise PromptTooLong(
            f"the prompt has {length} tokens and {wanted} is wanted, but the context holds "
            f"{limit}; shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
            param="prompt" if length >= limit else "max_tokens",
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        bad = next(id for id in request.prompt_ids if not 0 <= id < vocab_size)
        raise RequestError(
            f"prompt id {bad} is outside the vocabulary of {vocab_size}", param="prompt"
        )
    rank = limits.rank(request.priority, length)
    known, total = limits.classes[rank], length + (explicit or 1)
    pages = manager.pages_for(total)
    for what, wanted_count, bound in (
        ("tokens", total, known.max_tokens),
        ("pages", pages, known.max_pages),
    ):
        if bound is not None and wanted_count > bound:
            raise RequestError(
                f"the request needs {wanted_count} {what}, but priority class {known.name!r} "
                f"may hold {bound} in all; shorten it or name another class",
                param="priority",
            )
    return rank


def new_sequence(
    request: EngineRequest, limits: SchedulerLimits, manager: CacheManager, vocab_size: int
) -> Sequence:
    """Follow a request from now on: its class, its deadline, a seed where it names none.

    Raises:
        PromptTooLong: As `check_request`.
        RequestError: As `check_request`.
    """
    rank = check_request(request, limits, manager, vocab_size)
    deadline = request.deadline_s
    return Sequence(
        request,
        max_model_len=limits.max_model_len,
        seed=secrets.randbits(64),
        rank=rank,
        deadline=None if deadline is None else time.monotonic() + deadline,
    )


def refusal(reason: Literal["closing", "full"], num_waiting: int = 0) -> RequestError:
    """Return the error of an engine that takes no request now."""
    if reason == "closing":
        return RequestError(
            "the server is shutting down; send the request elsewhere",
            status=503,
            type="server_error",
            code="shutting_down",
        )
    return RequestError(
        f"{num_waiting} requests are waiting already; retry later",
        status=429,
        type="engine_overloaded_error",
        code="queue_full",
    )
