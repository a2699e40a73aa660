"""The engine: token ids in, token ids out, many requests at once.

One thread owns the model, the state and the scheduler. Everybody else only appends commands to a
queue and reads handles, so `submit` and `abort` may be called from any thread or coroutine. The
thread sleeps while there is nothing to do. A request that goes wrong ends alone, a step that raises
ends its requests; their slots and pages are free before the last output, and the loop goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError, RequestError
from moonlet.engine.admission import new_sequence, refusal
from moonlet.engine.emission import emit
from moonlet.engine.handle import RequestHandle
from moonlet.engine.limits import DEFAULT_CLASS, PriorityClass, SchedulerLimits
from moonlet.engine.memory import DEFAULT_MEMORY, MemoryOptions, build_memory, build_writeback
from moonlet.engine.request import EngineRequest, FinishReason, Sequence, TokenOutput
from moonlet.engine.runner import EngineModel, Runner
from moonlet.engine.sampling import Sampled
from moonlet.engine.scheduler import Scheduler
from moonlet.engine.sessions import build_sessions
from moonlet.engine.speculative import Speculation, SpeculativeConfig
from moonlet.engine.stats import EngineStats, read_stats
from moonlet.engine.step import Step

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

DEFAULT_BATCHED_TOKENS = 512


class Engine:
    """Continuous batching over one model.

    Args:
        model: `Transformer` or anything with its ``config``, ``forward`` and ``logits``.
        max_num_seqs: Requests computed at the same time; each holds a state slot.
        max_model_len: Prompt and output together; the model's own limit when absent.
        max_num_batched_tokens: Tokens per forward pass; when absent 512, or twice
            ``max_num_seqs`` where that is more.
        stop_ids: Ids at which the model ends a message; its ``eos_token_id`` when absent.
        memory: Sizes of the cache and whether prefixes are shared.
        classes: Priority classes, the most important one first.
        max_num_queued: Requests that may wait; beyond it `submit` refuses. No bound when absent.
        speculative: How to draft (`engine.speculative`); when absent, steps are plain.
        replay_decode: Run decode steps from tapes where that is possible (`engine.replay`).
        before_step: Called by the engine's thread with the number of rows before each forward pass.
        check_each_step: Run `check` after every step (tests).

    Attributes:
        sessions: Hand-over to and from other processes.

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
        memory: MemoryOptions = DEFAULT_MEMORY,
        classes: Iterable[PriorityClass] = (DEFAULT_CLASS,),
        max_num_queued: int | None = None,
        speculative: SpeculativeConfig | None = None,
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
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(DEFAULT_BATCHED_TOKENS, 2 * max_num_seqs)
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=length,
            classes=tuple(classes),
        )
        self.stop_ids = frozenset([config.eos_token_id] if stop_ids is None else stop_ids)
        manager, state = build_memory(
            config,
            self.limits,
            memory,
            stop_ids=self.stop_ids,
            dtype=model.dtype,
            device=model.device,
        )
        self._manager = manager
        self._scheduler = Scheduler(self.limits, manager)
        self._runner = Runner(model, state, unit_size=memory.unit_size, replay_decode=replay_decode)
        self._writeback = build_writeback(config, memory, manager, state, model.dtype)
        self.sessions = build_sessions(config, memory, manager, model.dtype)
        self._speculation: Speculation | None = None
        if speculative is not None:
            self._speculation = Speculation(
                speculative,
                max_num_batched_tokens=self.limits.max_num_batched_tokens,
                stop_ids=self.stop_ids,
                vocab_size=config.vocab_size,
                room=manager.window_room,
            )
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
        self._is_stalled = False
        if self._writeback is not None:
            self._writeback.on_loaded = lambda: self._post(lambda: None)
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
        sequence = new_sequence(request, self.limits, self._manager, self.config.vocab_size)
        handle = RequestHandle(request.request_id, self.abort)
        with self._changed:
            if self._is_closing:
                raise refusal("closing")
            waiting = self._scheduler.num_waiting + self._num_submitted
            if self._max_num_queued is not None and waiting >= self._max_num_queued:
                raise refusal("full", waiting)
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
        return read_stats(
            self._scheduler,
            self._counts,
            self._ends,
            num_submitted=self._num_submitted,
            num_forward_calls=self._runner.num_forward_calls,
            drafts={} if self._speculation is None else self._speculation.counts(),
            loads=None if self._writeback is None else self._writeback.loads.counts,
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
        if self._writeback is not None:
            self._writeback.close()

    def _obey(self) -> bool:
        """Carry out what was posted, sleeping while idle; False when it is time to end."""
        patience = self._scheduler.patience(time.monotonic()) if self._is_stalled else None
        with self._changed:
            self._changed.wait_for(self._is_due, patience)
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self._is_aborting:
            return False
        is_idle = self._is_stalled or not self._scheduler.has_work
        self._is_stalled = False
        if self._writeback is not None and is_idle:
            self._writeback.write_next()
        return self._scheduler.has_work or not self._is_closing

    def _is_due(self) -> bool:
        """Whether there is anything to do; all are stalled while only loads are waited for."""
        has_pending = self._writeback is not None and self._writeback.has_pending
        can_step = not self._is_stalled if self._scheduler.has_work else self._is_closing
        return bool(self._commands) or self._is_aborting or has_pending or can_step

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
        unfinished = self._scheduler.unfinished()
        self._runner.check(unfinished)
        if self._speculation is not None:
            self._speculation.check({s.request_id for s in unfinished})

    def _step(self) -> None:
        for sequence in self._scheduler.expired(time.monotonic()):
            waited = sequence.request.deadline_s
            self._end(sequence, "error", error=f"the deadline of {waited:g} s has passed")
        # a load may end while the scheduler looks; its wake-up comes after that
        was_loading = self._manager.is_loading
        step = self._scheduler.schedule()
        if step is None:
            self._is_stalled = self._scheduler.has_work
            is_held_up = was_loading or self._manager.is_loading
            assert not self._is_stalled or is_held_up, "nobody can run"
            return
        for restore in step.restores:
            sequence = restore.sequence
            self._handles[sequence.request_id].admit(sequence.num_cached_tokens)
        self._counts["steps"] += 1
        is_whole = False
        try:
            if self._speculation is not None:
                step = self._speculation.attach(step)
            if self._before_step is not None:
                self._before_step(step.num_tokens)
            results = self._runner.execute(step)
            is_whole = True
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(step.chunks))
            self._runner.abandon()
            self._fail(step, error)
            return
        finally:
            for restore in step.restores:
                self._manager.landed(restore, is_whole=is_whole)
        self._counts["prompt"] += sum(c.num_tokens for c in step.chunks if not c.is_decode)
        self._settle(step, results)
        if self._checks_each_step:
            self._check_now()

    def _fail(self, step: Step, error: Exception) -> None:
        """End the sequences of a step that raised: what they hold is not to be trusted."""
        text = f"internal error ({type(error).__name__}) while computing this request"
        for sequence in dict.fromkeys(part.sequence for part in (*step.chunks, *step.restores)):
            self._end(sequence, "error", error=text)

    def _settle(self, step: Step, results: list[tuple[Sequence, list[Sampled]]]) -> None:
        """Make what was computed and chosen part of the sequences, then deliver it."""
        sampler, scheduler = self._runner.sampler, self._scheduler
        scheduler.advance(step)
        emissions = [emit(s, chosen, sampler, scheduler, self.stop_ids) for s, chosen in results]
        self._runner.commit()
        if self._speculation is not None:
            self._speculation.record(emissions, is_typical=not self._runner.was_recorded)
        for save in scheduler.saves(step):
            self._manager.confirm(save, is_finite=self._runner.keep(save))
        for emission in emissions:
            self._runner.capture(emission.sequence)
            self._counts["generated"] += len(emission.ids)
            if emission.finish is None:
                self._handles[emission.sequence.request_id].put(emission.output())
            else:
                self._end(emission.sequence, emission.finish, emission.output())

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
        if self._speculation is not None:
            self._speculation.forget(sequence, has_ended_well=reason != "error")
        self._scheduler.finish(sequence, reason)
        self._ends[reason] += 1
        with self._changed:
            handle = self._handles.pop(sequence.request_id)
        handle.put(output or TokenOutput((), finish=reason, error=error))
