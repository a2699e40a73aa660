"""The engine: token ids in, token ids out, many requests at once.

One thread owns the model, the state and the scheduler. Everybody else only appends commands to a
queue and reads handles, so `submit` and `abort` may be called from any thread or coroutine. The
thread sleeps while there is nothing to do. A request that goes wrong ends alone, a step that raises
ends its requests; their slots and pages are free before the last output, and the loop goes on.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable

import torch

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError, PromptTooLong, RequestError
from moonlet.engine.cache.pages import PagePool
from moonlet.engine.cache.slots import SlotPool
from moonlet.engine.cache.state import PagedState, page_bytes
from moonlet.engine.handle import RequestHandle
from moonlet.engine.request import EngineRequest, FinishReason, Sequence, TokenOutput
from moonlet.engine.runner import EngineModel, Runner
from moonlet.engine.sampling import Sampled
from moonlet.engine.scheduler import ScheduledChunk, Scheduler, SchedulerLimits
from moonlet.engine.stats import EngineStats
from moonlet.engine.stopping import finish_after

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

DEFAULT_BATCHED_TOKENS = 512
DEFAULT_PAGE_SIZE = 64
DEFAULT_CACHE_BYTES = 4 << 30


def _default_pages(
    config: ModelConfig, limits: SchedulerLimits, page_size: int, dtype: torch.dtype
) -> int:
    """Pages for every sequence at full length, capped at 4 GiB, at least one full request."""
    per_sequence = -(-limits.max_model_len // page_size)
    wanted = limits.max_num_seqs * per_sequence
    bytes_per_page = page_bytes(config, page_size, dtype)
    if bytes_per_page:
        wanted = min(wanted, max(per_sequence, DEFAULT_CACHE_BYTES // bytes_per_page))
    return wanted


class Engine:
    """Continuous batching over one model.

    Args:
        model: `Transformer` or anything with its ``config``, ``forward`` and ``logits``.
        max_num_seqs: Requests computed at the same time; each holds a state slot.
        max_model_len: Prompt and output together; the model's own limit when absent.
        max_num_batched_tokens: Tokens per forward pass; 512 or ``max_num_seqs`` when absent.
        stop_ids: Ids at which the model ends a message; its ``eos_token_id`` when absent.
        page_size: MLA rows per page.
        num_pages: Pages in the pool; when absent, enough for every request at full length but at
            most 4 GiB.
        max_num_queued: Requests that may wait; beyond it `submit` refuses. No bound when absent.
        replay_decode: Run decode steps from tapes where that is possible (`engine.replay`).
        before_step: Called by the engine's thread with the number of rows before each forward pass.
        check_each_step: Run `check` after every step (tests).

    Raises:
        ConfigError: Limits that contradict each other.
    """

    def __init__(
        self,
        model: EngineModel,
        *,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
        page_size: int = DEFAULT_PAGE_SIZE,
        num_pages: int | None = None,
        max_num_queued: int | None = None,
        replay_decode: bool = True,
        before_step: Callable[[int], None] | None = None,
        check_each_step: bool = False,
    ) -> None:
        config = model.config
        length = config.max_position_embeddings if max_model_len is None else max_model_len
        if length > config.max_position_embeddings:
            raise ConfigError(
                f"engine.max_model_len is {length}; the model knows at most "
                f"{config.max_position_embeddings} positions"
            )
        budget = max_num_batched_tokens
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(DEFAULT_BATCHED_TOKENS, max_num_seqs)
            if budget is None
            else budget,
            max_model_len=length,
        )
        self.stop_ids = frozenset([config.eos_token_id] if stop_ids is None else stop_ids)
        pages = num_pages or _default_pages(config, self.limits, page_size, model.dtype)
        self._scheduler = Scheduler(self.limits, SlotPool(max_num_seqs), PagePool(pages, page_size))
        state = PagedState(
            config,
            num_slots=max_num_seqs,
            num_pages=pages,
            page_size=page_size,
            max_model_len=length,
            dtype=model.dtype,
            device=model.device,
        )
        self._runner = Runner(model, state, replay_decode=replay_decode)
        self._before_step = before_step
        self._max_num_queued = max_num_queued
        self._checks_each_step = check_each_step
        self._counts = dict.fromkeys(("steps", "prompt", "generated"), 0)
        self._ends: dict[FinishReason, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        # the condition guards the commands, the handles and the closing flags
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._num_submitted = 0
        self._handles: dict[str, RequestHandle] = {}
        self._is_closing = False
        self._is_aborting = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="moonlet-engine", daemon=True)
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------

    @property
    def config(self) -> ModelConfig:
        """Architecture of the model."""
        return self._runner.model.config

    @property
    def is_accepting(self) -> bool:
        """Whether `submit` takes requests: neither closed nor failed."""
        return not self._is_closing

    def submit(self, request: EngineRequest) -> RequestHandle:
        """Queue a request and return its stream.

        Raises:
            PromptTooLong: Prompt, or prompt plus explicit ``max_tokens``, exceeds the context.
            RequestError: An id is in use or outside the vocabulary (400), the queue is full
                (429), or the engine is closing (503).
        """
        self._validate(request)
        sequence = Sequence(
            request, max_model_len=self.limits.max_model_len, seed=secrets.randbits(64)
        )
        handle = RequestHandle(request.request_id, self.abort)
        with self._changed:
            if self._is_closing:
                raise RequestError(
                    "the server is shutting down; send the request elsewhere",
                    status=503,
                    type="server_error",
                    code="shutting_down",
                )
            waiting = self._scheduler.num_waiting + self._num_submitted
            if self._max_num_queued is not None and waiting >= self._max_num_queued:
                raise RequestError(
                    f"{waiting} requests are waiting already; retry later",
                    status=429,
                    type="engine_overloaded_error",
                    code="queue_full",
                )
            if request.request_id in self._handles:
                raise RequestError(
                    f"request id {request.request_id!r} is in use; choose another",
                    param="request_id",
                )
            self._handles[request.request_id] = handle
            self._num_submitted += 1
            self._commands.append(lambda: self._enqueue(sequence))
            self._changed.notify()
        return handle

    def abort(self, request_id: str) -> None:
        """End a request early; unknown and finished ids are ignored. Returns at once."""
        self._post(lambda: self._abort_now(request_id))

    def stats(self) -> EngineStats:
        """Return counters and gauges; never blocks on a running step."""
        scheduler, ends = self._scheduler, self._ends
        return EngineStats(
            num_steps=self._counts["steps"],
            num_forward_calls=self._runner.num_forward_calls,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._num_submitted,
            num_slots=scheduler.slots.num_slots,
            num_free_slots=scheduler.slots.num_free,
            num_pages=scheduler.pages.num_pages,
            num_free_pages=scheduler.pages.num_free,
            num_prompt_tokens=self._counts["prompt"],
            num_generated_tokens=self._counts["generated"],
            num_finished=ends["stop"] + ends["length"],
            num_aborted=ends["abort"],
            num_failed=ends["error"],
        )

    def check(self) -> None:
        """Assert that every structure is consistent; runs between two steps.

        Raises:
            AssertionError: One of ours is broken.
        """
        failures: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                self._check_now()
            except AssertionError as error:
                failures.append(error)
            finally:
                done.set()

        if not self._post(run):
            self._thread.join()
            run()
        done.wait()
        if failures:
            raise failures[0]

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Stop the engine; nothing is accepted from now on.

        Args:
            drain: Let accepted requests finish; else they end with ``finish="abort"``.
            timeout_s: How long to drain at most before aborting the rest.
        """
        with self._changed:
            self._is_closing = True
            self._is_aborting = self._is_aborting or not drain
            self._changed.notify()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s if drain else None)
        if self._thread.is_alive():
            self.close()

    def __enter__(self) -> Engine:
        """Return the engine; leaving the block closes it."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close without draining."""
        self.close()

    def _post(self, command: Callable[[], None]) -> bool:
        with self._changed:
            if self._is_over:
                return False
            self._commands.append(command)
            self._changed.notify()
        return True

    def _validate(self, request: EngineRequest) -> None:
        limit, length = self.limits.max_model_len, len(request.prompt_ids)
        explicit = request.sampling.max_tokens
        if length + (explicit or 1) > limit:
            wanted = f"max_tokens {explicit}" if explicit else "one token of output"
            raise PromptTooLong(
                f"the prompt has {length} tokens and {wanted} is wanted, but the context holds "
                f"{limit}; shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
                param="prompt" if length >= limit else "max_tokens",
            )
        vocab_size = self.config.vocab_size
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
            bad = next(id for id in request.prompt_ids if not 0 <= id < vocab_size)
            raise RequestError(
                f"prompt id {bad} is outside the vocabulary of {vocab_size}", param="prompt"
            )

    # ---- engine thread ---------------------------------------------------------------------

    def _run(self) -> None:
        reason: FinishReason = "error"
        try:
            while self._obey():
                self._step()
            reason = "abort"
        except Exception:
            logger.exception("the engine thread failed; all its requests end now")
        finally:
            self._end_all(reason)

    def _end_all(self, reason: FinishReason) -> None:
        """End whatever is left, whatever state it is in: no consumer may wait for ever."""
        with self._changed:
            self._is_closing = self._is_aborting = self._is_over = True
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        error = "the engine has failed" if reason == "error" else None
        for sequence in self._scheduler.unfinished():
            try:
                self._end(sequence, reason, error=error)
            except Exception:
                logger.exception("request %s did not end cleanly", sequence.request_id)
        with self._changed:
            handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.put(TokenOutput((), finish=reason, error=error))

    def _obey(self) -> bool:
        """Carry out what was posted, sleeping while idle; False when it is time to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._commands) or self._scheduler.has_work or self._is_closing
            )
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self._is_aborting:
            return False
        return self._scheduler.has_work or not self._is_closing

    def _enqueue(self, sequence: Sequence) -> None:
        with self._changed:
            self._num_submitted -= 1
        self._scheduler.add(sequence)

    def _abort_now(self, request_id: str) -> None:
        sequence = self._scheduler.get(request_id)
        if sequence is not None:
            self._end(sequence, "abort")

    def _check_now(self) -> None:
        self._scheduler.check()
        self._runner.check(s for s in self._scheduler.unfinished() if s.slot is not None)

    def _step(self) -> None:
        step = self._scheduler.schedule()
        if step is None:
            assert not self._scheduler.has_work, "sequences wait but none can run"
            return
        self._counts["steps"] += 1
        try:
            if self._before_step is not None:
                self._before_step(step.num_tokens)
            results = self._runner.execute(step)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(step.chunks))
            self._runner.abandon()
            for chunk in step.chunks:
                text = f"internal error ({type(error).__name__}) while computing this request"
                self._end(chunk.sequence, "error", error=text)
            return
        self._count_prompt_tokens(step.chunks)
        self._scheduler.advance(step)
        for sequence, sampled in results:
            self._deliver(sequence, sampled)
        if self._checks_each_step:
            self._check_now()

    def _count_prompt_tokens(self, chunks: Iterable[ScheduledChunk]) -> None:
        self._counts["prompt"] += sum(c.num_tokens for c in chunks if not c.is_decode)

    def _deliver(self, sequence: Sequence, sampled: Sampled) -> None:
        if sampled.error is not None:
            self._end(sequence, "error", error=sampled.error)
            return
        self._counts["generated"] += 1
        self._scheduler.append(sequence, sampled.id)
        logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
        try:
            reason = finish_after(sequence, sampled.id, self.stop_ids)
        except Exception as error:
            self._end(sequence, "error", error=f"the constraint failed: {error}")
            return
        if reason is not None:
            self._end(sequence, reason, TokenOutput((sampled.id,), logprobs, reason))
            return
        self._handles[sequence.request_id].put(TokenOutput((sampled.id,), logprobs))

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        output: TokenOutput | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """Free everything, then deliver the last output."""
        self._runner.release(sequence)
        self._scheduler.finish(sequence, reason)
        self._ends[reason] += 1
        with self._changed:
            handle = self._handles.pop(sequence.request_id)
        handle.put(output or TokenOutput((), finish=reason, error=error))
