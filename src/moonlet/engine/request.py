"""What goes into the engine and what comes out: requests, token outputs, and the state machine.

A request is followed by a `Sequence`, whose state only the scheduler changes:

    submit            admitted: states      last known token
      |               and pages taken       computed, next one sampled
      v                     |                     |
    WAITING ----------> PREFILL ------------> DECODE ---+
      |  ^     |          ^ |                     |     |  stop id, max_tokens, context full,
      |  |     +> LOADING + |                     |     |  deadline, or an error of this request
      |  |          |       |                     |     |
      |  |    preempted, or a load that failed    |     |
      |  +----------+-------+----------+----------+     v
      |                                |             FINISHED
      +--------------------------------+--> ABORTED     ^
      |        abort, or engine closed                  |
      +-------------------------------------------------+
        an error or the deadline while waiting, loading or in prefill

WAITING, FINISHED and ABORTED own no state and no page. LOADING owns those that its prefix will be
copied to; nobody writes them before it has arrived, so they can be taken back at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

from moonlet.core.constraint import TokenConstraint
from moonlet.core.errors import RequestError
from moonlet.engine.cache.chain import MediaSpan, PrefixChain
from moonlet.engine.cache.checkpoints import Checkpoint, CheckpointKind

__all__ = [
    "EngineRequest",
    "FinishReason",
    "PrefixLoad",
    "RequestState",
    "SamplingParams",
    "Sequence",
    "TokenLogprobs",
    "TokenOutput",
]

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_SEED_BITS = 64


class RequestState(Enum):
    """Where a request is in its life; see the drawing in the module docstring."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens to the request."""
        return self in (RequestState.FINISHED, RequestState.ABORTED)


def _check_number(
    name: str, value: object, low: float, high: float, *, low_open: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}; it must be a finite number", param=name)
    if value < low or value > high or (low_open and value == low):
        bracket = "(" if low_open else "["
        closing = "]" if math.isfinite(high) else ")"
        raise RequestError(
            f"{name} is {value}; it must lie in {bracket}{low:g}, {high:g}{closing}", param=name
        )


def _check_integer(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it must be an integer", param=name)
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} is {value}; it must be {wanted}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    Attributes:
        temperature: 0 means greedy: the most probable id, the lowest one on a tie.
        top_p: Keep the smallest set of ids whose probability reaches this mass.
        top_k: Keep the k most probable ids; 0 or -1 keeps all.
        min_p: Drop ids whose probability is below this share of the best one's.
        seed: Makes sampled tokens reproducible whatever else is in the batch; None draws one.
        presence_penalty: Subtracted once from the logit of every id generated so far.
        frequency_penalty: Subtracted once per occurrence among the generated ids.
        repetition_penalty: Divides positive and multiplies negative logits of ids that occur in
            the prompt or among the generated ids.
        max_tokens: Generated tokens at most, the stop id included; None means up to the context.
        stop_token_ids: Ids that end generation, beside the engine's own.
        ignore_eos: Do not end at the engine's stop ids; `stop_token_ids` still apply.
        logprobs: None for none; n reports the chosen id and the n most probable ids, from the
            model's own distribution (before penalties and temperature).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every range; the errors carry the field name."""
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_integer("top_k", self.top_k, -1, None)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True)
        if self.seed is not None:
            limit = 1 << (MAX_SEED_BITS - 1)
            _check_integer("seed", self.seed, -limit, 2 * limit - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for id in self.stop_token_ids:
            _check_integer("stop_token_ids", id, 0, None)
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable id is taken without a draw."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes the logits."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt to continue.

    Attributes:
        request_id: Unique among the requests that the engine has not finished.
        prompt_ids: At least one token id; any sequence of integers, stored as a tuple.
        constraint: Says which ids may come next; it belongs to this request alone.
        cache_salt: Prefixes are shared between requests of the same salt only.
        media: Images that stand in the prompt.
        priority: Name of a priority class; the first class that takes prompts of this length when
            absent.
        deadline_s: Seconds from now after which the request ends with an error, finished or not.
        capture: Called by the engine's thread with the sequence and the memory it is in, when the
            prompt is computed and nothing after it.
    """

    request_id: str
    prompt_ids: SequenceOf[int]
    sampling: SamplingParams = SamplingParams()
    constraint: TokenConstraint | None = None
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    priority: str | None = None
    deadline_s: float | None = None
    capture: Callable[[Any, Any], None] | None = None

    def __post_init__(self) -> None:
        """Freeze the prompt and check the deadline."""
        if self.deadline_s is not None:
            _check_number("deadline_s", self.deadline_s, 0.0, math.inf, low_open=True)
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        if not self.prompt_ids:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one generated position.

    Attributes:
        id: The emitted id.
        logprob: Its natural logarithm of probability under the model.
        top: The most probable ids with their log probabilities, best first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Some more tokens of one request.

    Attributes:
        ids: New ids in order; a stop id that ended generation is the last of them.
        logprobs: One entry per id where the request asked for them, else None.
        finish: Set on the last output of a request and only there.
        error: What went wrong where ``finish`` is ``"error"``.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    error: str | None = None


class PrefixLoad(Protocol):
    """A prefix on its way from outside the arenas; `cache.external.Load` is one."""

    @property
    def key(self) -> bytes:
        """Its name."""
        ...

    @property
    def num_tokens(self) -> int:
        """Its length."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether it has arrived or failed."""
        ...

    @property
    def checkpoint(self) -> Any:
        """What has arrived; None before that and after a failure."""
        ...


class Sequence:
    """One request on its way through the engine: its state, its resources, its tokens.

    Attributes:
        state: Changed by the scheduler only.
        rank: Priority class, 0 first.
        arrival: Order of arrival.
        deadline: Clock time at which it ends whatever its state, or None.
        states: Blocks of recurrent state, one per KDA group; none while it waits.
        pages: Pages of MLA rows in order of position.
        num_computed: Tokens whose effect is in the states and pages.
        num_cached_tokens: Tokens that the last admission found computed.
        num_registered: Units of its pages that the prefix index knows.
        num_preemptions: How often its memory was taken away.
        chain: Hashes of its complete units.
        marks: Endpoints where its states are to be kept, and why.
        rolling: The newest checkpoint that it made.
        load: Its prefix on the way from outside the arenas.
        max_total_tokens: Prompt and output together never exceed this.
        seed: The request's seed, or the one drawn for it.
    """

    __slots__ = (
        "arrival",
        "chain",
        "deadline",
        "finish_reason",
        "load",
        "marks",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_registered",
        "output_ids",
        "pages",
        "prompt_ids",
        "rank",
        "request",
        "rolling",
        "seed",
        "state",
        "states",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        max_model_len: int,
        seed: int = 0,
        rank: int = 0,
        deadline: float | None = None,
    ) -> None:
        self.request = request
        self.prompt_ids: tuple[int, ...] = tuple(request.prompt_ids)
        self.output_ids: list[int] = []
        self.state = RequestState.WAITING
        self.rank = rank
        self.arrival = 0
        self.deadline = deadline
        self.states: tuple[int, ...] = ()
        self.pages: list[int] = []
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.num_registered = 0
        self.num_preemptions = 0
        self.chain = PrefixChain(b"", 1)
        self.marks: dict[int, CheckpointKind] = {}
        self.rolling: Checkpoint | None = None
        self.load: PrefixLoad | None = None
        self.finish_reason: FinishReason | None = None
        limit = request.sampling.max_tokens
        total = max_model_len if limit is None else len(self.prompt_ids) + limit
        self.max_total_tokens = min(total, max_model_len)
        self.seed = seed if request.sampling.seed is None else request.sampling.seed

    @property
    def slot(self) -> int | None:
        """Block of the first KDA group, which in an engine is the only one."""
        return self.states[0] if self.states else None

    @property
    def request_id(self) -> str:
        """The id that the request carries."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_range(self, start: int, stop: int) -> SequenceOf[int]:
        """Ids at positions ``start`` to ``stop`` (exclusive) of prompt and output together."""
        prompt_length = len(self.prompt_ids)
        if stop <= prompt_length:
            return self.prompt_ids[start:stop]
        if start >= prompt_length:
            return self.output_ids[start - prompt_length : stop - prompt_length]
        return (*self.prompt_ids[start:], *self.output_ids[: stop - prompt_length])
