"""Which sequences run in the next step, and with how many tokens: bookkeeping, no tensors.

Every step mixes one token of each decoding sequence with as much prompt as the token budget leaves
(chunked prefill). Chunks end where a state will be looked up later, so that a prefix shared by two
requests is computed once (hybrid-cache.md sections 8, 10 and 11).

Order: priority classes one after the other, inside a class first come, first served. A sequence is
admitted with the pages of all its known tokens and grows page by page; where none is left, the
least important sequence that runs gives its memory back, keeps its last checkpoint and waits at the
front. The most important one is never asked, and the pool holds at least one request of full
length, so something always advances and everything finishes. After a preemption fewer sequences are
admitted for a while. What comes from outside the arenas is waited for aside (`engine.loading`).

Prompts that need several steps ("long" ones) leave most of the budget to short ones: they may count
on a quarter, at least one unit and at most half, and get what is left over. A request whose next
unit of prefix is being computed in this step waits for it instead of computing it twice.
"""

from __future__ import annotations

from moonlet.core.errors import ConfigError
from moonlet.engine import consistency
from moonlet.engine.budget import StepBudget
from moonlet.engine.cache.lookup import NOTHING_FOUND
from moonlet.engine.cache.manager import CacheManager, Restore, Save
from moonlet.engine.limits import SchedulerLimits
from moonlet.engine.loading import LoadingSequences
from moonlet.engine.queues import WaitingQueues
from moonlet.engine.request import FinishReason, RequestState, Sequence
from moonlet.engine.sharing import producer_of, stop_where_they_part
from moonlet.engine.step import ScheduledChunk, Step

__all__ = ["Scheduler"]

_MOVES = {
    RequestState.WAITING: {
        RequestState.LOADING,
        RequestState.PREFILL,
        RequestState.FINISHED,
        RequestState.ABORTED,
    },
    RequestState.LOADING: {
        RequestState.PREFILL,
        RequestState.WAITING,
        RequestState.FINISHED,
        RequestState.ABORTED,
    },
    RequestState.PREFILL: {
        RequestState.DECODE,
        RequestState.WAITING,
        RequestState.FINISHED,
        RequestState.ABORTED,
    },
    RequestState.DECODE: {RequestState.WAITING, RequestState.FINISHED, RequestState.ABORTED},
    RequestState.FINISHED: set(),
    RequestState.ABORTED: set(),
}
# steps without preemption after which one more sequence may run again
_RECOVERY_STEPS = 16


class Scheduler:
    """Owns the queues and the running sequences.

    Args:
        limits: Bounds of the engine.
        manager: Memory of the sequences; it must hold one request of ``max_model_len``.
    """

    def __init__(self, limits: SchedulerLimits, manager: CacheManager) -> None:
        pages, states = manager.cache.pages, manager.cache.states
        groups = manager.cache.num_groups
        needed = manager.pages_for(limits.max_model_len)
        if needed + (groups if pages is states else 0) > pages.num_blocks:
            raise ConfigError(
                f"{pages.num_blocks} pages of {manager.page_size} rows cannot hold one request of "
                f"engine.max_model_len {limits.max_model_len}; raise num_pages or lower the length"
            )
        if pages is not states and states.num_blocks < limits.max_num_seqs * groups:
            raise ConfigError(
                f"{states.num_blocks} state slots for engine.max_num_seqs {limits.max_num_seqs}; "
                "each running sequence needs one"
            )
        self.limits = limits
        self.manager = manager
        self.num_preemptions = 0
        self._waiting = WaitingQueues(len(limits.classes))
        self._running: dict[str, Sequence] = {}
        self._loading = LoadingSequences(manager, limits.max_num_seqs)
        self._known: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._num_allowed = limits.max_num_seqs
        self._calm_steps = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no resource."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that are computed."""
        return len(self._running)

    @property
    def num_loading(self) -> int:
        """Sequences that wait for their prefix from outside the arenas."""
        return len(self._loading)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished; then `schedule` returns a step unless loads last."""
        return bool(self._known)

    def get(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that id, if any."""
        return self._known.get(request_id)

    def unfinished(self) -> list[Sequence]:
        """All sequences that go on, in order of arrival."""
        return list(self._known.values())

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline is not after ``now``."""
        return [s for s in self._known.values() if s.deadline is not None and s.deadline <= now]

    def patience(self, now: float) -> float | None:
        """Seconds until the next deadline, None without one."""
        deadlines = [s.deadline for s in self._known.values() if s.deadline is not None]
        return max(0.0, min(deadlines) - now) if deadlines else None

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; its id must be unknown and its length within the limits."""
        assert sequence.state is RequestState.WAITING
        assert sequence.request_id not in self._known, f"id {sequence.request_id} is in use"
        assert len(sequence.prompt_ids) < sequence.max_total_tokens <= self.limits.max_model_len
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.manager.open(sequence)
        self._known[sequence.request_id] = sequence
        self._waiting.add(sequence)

    # ---- one step --------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Choose the next step and admit what fits; None where nothing can run."""
        order = self._order()
        preempted: list[tuple[Sequence, int]] = []
        chunks = self._decode_chunks(order, preempted)
        self._recover(bool(preempted))
        budget = StepBudget(
            self.limits.max_num_batched_tokens - len(chunks), self.manager.unit_size
        )
        prefilling = [s for s in order if s.state is RequestState.PREFILL]
        budget.reserve(prefilling + self._waiting.heads())
        producing: dict[bytes, Sequence] = {}
        # the share of long prompts first, so that others see what they compute; the rest last
        for sequence in sorted(prefilling, key=budget.is_long, reverse=True):
            self._add_chunk(sequence, budget.offer(sequence), budget, chunks, producing)
        restores = self._admit(budget, chunks, producing)
        for sequence in self._order():
            if sequence.state is RequestState.PREFILL:
                self._add_chunk(sequence, budget.left, budget, chunks, producing)
        assert chunks or not restores
        if not chunks:
            return None
        return Step(tuple(chunks), tuple(restores), tuple(preempted))

    def advance(self, step: Step) -> None:
        """Record that the step's tokens are in the state, its drafts not yet."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens - len(chunk.drafts)
            is_known = sequence.num_computed == sequence.num_tokens
            if is_known and sequence.state is RequestState.PREFILL:
                self._move(sequence, RequestState.DECODE)

    def append(self, sequence: Sequence, id: int) -> None:
        """Add a sampled token to a decoding sequence whose tokens are all computed."""
        assert sequence.state is RequestState.DECODE
        assert sequence.num_computed == sequence.num_tokens < sequence.max_total_tokens
        sequence.output_ids.append(id)

    def confirm(self, sequence: Sequence) -> None:
        """Record that the newest token was a draft whose row is computed."""
        sequence.num_computed += 1
        assert sequence.num_computed == sequence.num_tokens

    def saves(self, step: Step) -> list[Save]:
        """Return what may be found after the step, before any of its sequences ends.

        The states must be those of `Sequence.num_computed`; copy them, then
        `CacheManager.confirm` each.
        """
        saves = (self.manager.advanced(chunk.sequence, chunk.start) for chunk in step.chunks)
        return [save for save in saves if save is not None]

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
        self._take_out(sequence)
        self.manager.close(sequence, is_finished=reason in ("stop", "length"))

    def _take_out(self, sequence: Sequence) -> None:
        if sequence in self._loading:
            self._loading.remove(sequence)
        else:
            del self._running[sequence.request_id]

    def _placed(self) -> list[Sequence]:
        """Sequences that hold memory."""
        return [*self._running.values(), *self._loading]

    def _order(self) -> list[Sequence]:
        return sorted(self._running.values(), key=_importance)

    def _decode_chunks(
        self, order: list[Sequence], preempted: list[tuple[Sequence, int]]
    ) -> list[ScheduledChunk]:
        chunks = []
        for sequence in order:
            if sequence.state is not RequestState.DECODE:
                continue
            while not self.manager.grow(sequence, sequence.num_tokens):
                # a load taken back costs the least, and leaves everyone who runs running
                victim = max(self._loading or self._running.values(), key=_importance)
                assert victim.slot is not None
                preempted.append((victim, victim.slot))
                self._preempt(victim)
                if victim is sequence:
                    break
            if sequence.state is RequestState.DECODE:
                chunks.append(ScheduledChunk(sequence, sequence.num_computed, 1))
        return chunks

    def _preempt(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Let a sequence wait again, without anything."""
        self.manager.close(sequence, is_finished=False)
        sequence.num_computed = 0
        self._move(sequence, RequestState.WAITING)
        self._waiting.add(sequence)

    def _recover(self, is_pressed: bool) -> None:
        """Admit fewer sequences after a preemption, one more again after some calm steps."""
        if is_pressed:
            self._num_allowed = max(1, len(self._placed()))
            self._calm_steps = 0
            return
        self._calm_steps += 1
        if self._calm_steps >= _RECOVERY_STEPS and self._num_allowed < self.limits.max_num_seqs:
            self._num_allowed += 1
            self._calm_steps = 0

    def _add_chunk(
        self,
        sequence: Sequence,
        tokens: int,
        budget: StepBudget,
        chunks: list[ScheduledChunk],
        producing: dict[bytes, Sequence],
    ) -> None:
        """Plan ``tokens`` of a prompt, or that many more where a chunk is planned already."""
        if tokens <= 0:
            return
        owners = [chunk.sequence for chunk in chunks]
        index = owners.index(sequence) if sequence in owners else None
        planned = chunks[index].num_tokens if index is not None else 0
        start = sequence.num_computed
        end = self.manager.plan_end(sequence, planned + tokens)
        unit = self.manager.unit_size
        is_aligned = end == sequence.num_tokens or end % unit == 0 or not self.manager.is_sharing
        # a chunk that ends between endpoints keeps nothing: better none, if another prompt runs
        if not is_aligned and any(s.state is RequestState.PREFILL for s in owners):
            return
        if end - start <= planned:
            return
        chunk = ScheduledChunk(sequence, start, end - start)
        if index is None:
            chunks.append(chunk)
        else:
            chunks[index] = chunk
        budget.take(sequence, end - start - planned)
        for key in sequence.chain.keys[start // unit : end // unit]:
            producing.setdefault(key, sequence)

    def _admit(
        self, budget: StepBudget, chunks: list[ScheduledChunk], producing: dict[bytes, Sequence]
    ) -> list[Restore]:
        restores = self._arrivals(budget, chunks, producing)
        for rank in range(len(self.limits.classes)):
            for sequence in self._waiting.of(rank):
                num_placed = len(self._placed())
                if num_placed >= self._num_allowed or not self._has_share(sequence):
                    break
                if not budget.is_long(sequence) and budget.offer(sequence) <= 0:
                    break
                found = self.manager.lookup(sequence)
                producer = producer_of(sequence, found.common, producing, self.manager.unit_size)
                if producer is not None:
                    stop_where_they_part(sequence, producer, chunks, budget, self.manager.unit_size)
                    continue
                if self._loading.must_wait(found):
                    continue
                spare = sum(map(self._may_grow, self._placed()))
                restore = self.manager.admit(sequence, found, spare)
                if restore is None and not num_placed:
                    # what it would resume from is itself in the way: better computed than stuck
                    restore = self.manager.admit(sequence, NOTHING_FOUND, 0)
                if restore is None:
                    break
                self._waiting.remove(sequence)
                if sequence.load is not None:
                    self._loading.add(sequence)
                    self._move(sequence, RequestState.LOADING)
                    # what was in memory has arrived; nobody waits again while the queue is walked
                    if sequence.load.checkpoint is None:
                        continue
                    self._loading.remove(sequence)
                    restore = self.manager.arrived(sequence)
                restores.append(restore)
                self._begin(sequence, budget, chunks, producing)
        return restores

    def _arrivals(
        self, budget: StepBudget, chunks: list[ScheduledChunk], producing: dict[bytes, Sequence]
    ) -> list[Restore]:
        """Let the sequences run whose prefix has arrived; after a failure they wait again."""
        restores = []
        for sequence in self._loading.take_done():
            if sequence.load is None or sequence.load.checkpoint is None:
                self._give_back(sequence)
                continue
            restores.append(self.manager.arrived(sequence))
            self._begin(sequence, budget, chunks, producing)
        return restores

    def _begin(
        self,
        sequence: Sequence,
        budget: StepBudget,
        chunks: list[ScheduledChunk],
        producing: dict[bytes, Sequence],
    ) -> None:
        self._running[sequence.request_id] = sequence
        self._move(sequence, RequestState.PREFILL)
        self._add_chunk(sequence, budget.offer(sequence), budget, chunks, producing)

    def _may_grow(self, sequence: Sequence) -> bool:
        return self.manager.pages_for(sequence.max_total_tokens) > len(sequence.pages)

    def _has_share(self, sequence: Sequence) -> bool:
        """Whether the budgets of the sequence's class have room for it."""
        known = self.limits.classes[sequence.rank]
        peers = [s for s in self._placed() if s.rank == sequence.rank]
        if known.max_seqs is not None and len(peers) >= known.max_seqs:
            return False
        tokens = sum(s.num_tokens for s in peers) + sequence.num_tokens
        if known.max_tokens is not None and peers and tokens > known.max_tokens:
            return False
        pages = sum(len(s.pages) for s in peers) + self.manager.pages_for(sequence.num_tokens + 1)
        return known.max_pages is None or not peers or pages <= known.max_pages

    # ---- consistency -----------------------------------------------------------------------

    def check(self) -> None:
        """Assert that no block or sequence is lost, shared wrongly or out of step."""
        placed = self._placed()
        assert len(placed) <= self.limits.max_num_seqs
        assert len(placed) + len(self._waiting) == len(self._known), "a sequence is lost"
        consistency.check_ownership(self.manager, placed)
        for sequence in self._waiting:
            consistency.check_waiting(sequence)
        for sequence in self._loading:
            consistency.check_loading(sequence)
        for sequence in self._running.values():
            consistency.check_running(sequence, self.manager.pages_for(sequence.num_computed))

    @staticmethod
    def _move(sequence: Sequence, state: RequestState) -> None:
        assert state in _MOVES[sequence.state], f"{sequence.state} -> {state} is not a move"
        sequence.state = state


def _importance(sequence: Sequence) -> tuple[int, int]:
    return (sequence.rank, sequence.arrival)
