"""Which sequences run in the next step, and with how many tokens: bookkeeping, no tensors.

Every step mixes one token of each decoding sequence with as much prompt as the token budget
leaves (chunked prefill). Admission is first come, first served: a sequence takes a state slot and
the pages of its whole possible length at once, so an admitted sequence always finishes and two
half-admitted prompts cannot block each other (hybrid-cache.md section 11). Nothing is scheduled
with zero tokens, and each step with a runnable sequence advances at least one token.

Left out: preemption (full reservation never needs it), prefix reuse,
verification windows, budget classes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from moonlet.core.errors import ConfigError
from moonlet.engine.cache.pages import PagePool
from moonlet.engine.cache.slots import SlotPool
from moonlet.engine.request import FinishReason, RequestState, Sequence

__all__ = ["ScheduledChunk", "Scheduler", "SchedulerLimits", "Step"]

_MOVES = {
    RequestState.WAITING: {RequestState.PREFILL, RequestState.FINISHED, RequestState.ABORTED},
    RequestState.PREFILL: {RequestState.DECODE, RequestState.FINISHED, RequestState.ABORTED},
    RequestState.DECODE: {RequestState.FINISHED, RequestState.ABORTED},
    RequestState.FINISHED: set(),
    RequestState.ABORTED: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one engine.

    Attributes:
        max_num_seqs: Sequences that hold a slot at the same time.
        max_num_batched_tokens: Tokens per step; at least ``max_num_seqs``, so that decoding
            never starves a prompt nor the reverse.
        max_model_len: Prompt and output of one request together.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}; it must be positive")
        if self.max_model_len < 2:
            raise ConfigError("engine.max_model_len is 1; a prompt and one token need 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens is {self.max_num_batched_tokens}, less than "
                f"engine.max_num_seqs {self.max_num_seqs}; every running sequence needs one token"
            )


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The tokens of one sequence in one step: positions start to start + num_tokens."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """Whether this is the step of a decoding sequence."""
        return self.sequence.state is RequestState.DECODE

    @property
    def needs_logits(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one can be sampled."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: decoding sequences first, then prompt chunks.

    Attributes:
        admitted: Sequences that took their slot and pages for this step.
    """

    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks together."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Owns the queue, the running sequences and the pools.

    Args:
        limits: Bounds of the engine.
        slots: State slots; as many as ``max_num_seqs``.
        pages: MLA pages; enough for one request of ``max_model_len``.
    """

    def __init__(self, limits: SchedulerLimits, slots: SlotPool, pages: PagePool) -> None:
        if pages.pages_for(limits.max_model_len) > pages.num_pages:
            raise ConfigError(
                f"{pages.num_pages} pages of {pages.page_size} rows cannot hold one request of "
                f"engine.max_model_len {limits.max_model_len}; raise num_pages or lower the length"
            )
        if slots.num_slots < limits.max_num_seqs:
            raise ConfigError(
                f"{slots.num_slots} state slots for engine.max_num_seqs {limits.max_num_seqs}; "
                "each running sequence needs one"
            )
        self.limits = limits
        self.slots = slots
        self.pages = pages
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._known: dict[str, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no resource yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return a step."""
        return bool(self._known)

    def get(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that id, if any."""
        return self._known.get(request_id)

    def unfinished(self) -> list[Sequence]:
        """All sequences that have not ended, in order of arrival."""
        return list(self._known.values())

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; its id must be unknown and its length within the limits."""
        assert sequence.state is RequestState.WAITING
        assert sequence.request_id not in self._known, f"id {sequence.request_id} is in use"
        assert len(sequence.prompt_ids) < sequence.max_total_tokens <= self.limits.max_model_len
        self._known[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def schedule(self) -> Step | None:
        """Choose the next step and admit what fits; None where nothing can run."""
        decoding = [s for s in self._running.values() if s.state is RequestState.DECODE]
        chunks = [ScheduledChunk(s, s.num_computed, 1) for s in decoding]
        budget = self.limits.max_num_batched_tokens - len(chunks)
        for sequence in self._running.values():
            if budget and sequence.state is RequestState.PREFILL:
                chunks.append(self._prompt_chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        admitted = []
        while budget and self._waiting and self._fits(self._waiting[0]):
            sequence = self._admit()
            admitted.append(sequence)
            chunks.append(self._prompt_chunk(sequence, budget))
            budget -= chunks[-1].num_tokens
        return Step(tuple(chunks), tuple(admitted)) if chunks else None

    def advance(self, step: Step) -> None:
        """Record that the step's tokens are in the state."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            if sequence.num_computed == len(sequence.prompt_ids):
                self._move(sequence, RequestState.DECODE)

    def append(self, sequence: Sequence, id: int) -> None:
        """Add a sampled token to a decoding sequence whose tokens are all computed."""
        assert sequence.state is RequestState.DECODE
        assert sequence.num_computed == sequence.num_tokens < sequence.max_total_tokens
        sequence.output_ids.append(id)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any unfinished state and free what it holds."""
        was_waiting = sequence.state is RequestState.WAITING
        is_abort = reason == "abort"
        self._move(sequence, RequestState.ABORTED if is_abort else RequestState.FINISHED)
        sequence.finish_reason = reason
        del self._known[sequence.request_id]
        if was_waiting:
            self._waiting.remove(sequence)
            return
        del self._running[sequence.request_id]
        assert sequence.slot is not None
        self.slots.release(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.slot = None
        sequence.pages = []

    def check(self) -> None:
        """Assert that no slot, page or sequence is lost, shared or out of step."""
        self.slots.check()
        self.pages.check()
        running = list(self._running.values())
        assert {s.slot for s in running} == self.slots.used(), "slots and owners differ"
        assert len({s.slot for s in running}) == len(running), "a slot has two owners"
        owned = [page for s in running for page in s.pages]
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert set(owned) == self.pages.used(), "pages and owners differ"
        assert len(running) <= self.limits.max_num_seqs
        assert len(running) + len(self._waiting) == len(self._known), "a sequence is lost"
        for sequence in self._waiting:
            assert sequence.state is RequestState.WAITING
            assert sequence.slot is None
            assert not sequence.pages
        for sequence in running:
            in_prompt = sequence.num_computed < len(sequence.prompt_ids)
            wanted = RequestState.PREFILL if in_prompt else RequestState.DECODE
            assert sequence.state is wanted, f"{sequence.state} at {sequence.num_computed}"
            assert sequence.num_computed <= sequence.num_tokens <= sequence.max_total_tokens
            assert len(sequence.pages) == self.pages.pages_for(sequence.max_total_tokens)

    def _prompt_chunk(self, sequence: Sequence, budget: int) -> ScheduledChunk:
        left = len(sequence.prompt_ids) - sequence.num_computed
        return ScheduledChunk(sequence, sequence.num_computed, min(left, budget))

    def _fits(self, sequence: Sequence) -> bool:
        needed = self.pages.pages_for(sequence.max_total_tokens)
        has_room = self.num_running < self.limits.max_num_seqs and self.slots.num_free > 0
        return has_room and self.pages.num_free >= needed

    def _admit(self) -> Sequence:
        sequence = self._waiting[0]
        sequence.pages = self.pages.allocate(self.pages.pages_for(sequence.max_total_tokens))
        sequence.slot = self.slots.allocate()
        self._waiting.popleft()
        self._running[sequence.request_id] = sequence
        self._move(sequence, RequestState.PREFILL)
        return sequence

    @staticmethod
    def _move(sequence: Sequence, state: RequestState) -> None:
        assert state in _MOVES[sequence.state], f"{sequence.state} -> {state} is not a move"
        sequence.state = state
