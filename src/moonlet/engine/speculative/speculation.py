"""Rounds of speculation: drafts are put into a scheduled step, and what became of them is counted.

`attach` asks the drafter about every decoding sequence and lets the control decide how many of the
drafts enter the step; `record`, after the step, compares what was proposed with what came. Between
the two the runner verifies and the engine emits, as in a step without drafts.

Looking for drafts costs the drafter's own time. A sequence that got none for some steps naps, and
is looked at again after some more tokens, twice as many each time it was in vain; while all nap,
or without credit (`control.py`), a step does nothing here. Without the control nobody naps.

A draft never reaches beyond the rows that a sequence may have: of the tokens that may still come,
the last one needs no row. Nor does it reach beyond a stop id or the end of a constraint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from moonlet.engine.constraints import legal_start
from moonlet.engine.emission import Emission
from moonlet.engine.request import Sequence
from moonlet.engine.speculative.config import SpeculativeConfig
from moonlet.engine.speculative.control import LengthControl, Proposal, Round, StepRecord
from moonlet.engine.speculative.drafter import Drafter
from moonlet.engine.speculative.ngram import NGramDrafter
from moonlet.engine.speculative.suffix import SuffixDrafter
from moonlet.engine.step import ScheduledChunk, Step

__all__ = ["Speculation", "make_drafter"]


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """Return the drafter of the configured method."""
    if config.method == "ngram":
        return NGramDrafter(config)
    # what one tenant was told never becomes a draft, and with it a matter of time, for another
    return SuffixDrafter(config, tenant_of=lambda sequence: sequence.request.cache_salt)


# steps without drafts after which a sequence naps, and tokens that naps last
PATIENCE = 8
FIRST_NAP, LONGEST_NAP = 8, 64
# steps that nobody looks at where there is no credit
STEPS_WITHOUT_CREDIT = 32


class _Nap:
    """How long one sequence has got no drafts, and until which token it is left alone."""

    __slots__ = ("length", "num_idle", "until")

    def __init__(self) -> None:
        self.num_idle, self.until, self.length = 0, 0, FIRST_NAP

    def note(self, num_drafts: int, num_tokens: int) -> None:
        """Take in what a step gave the sequence, which then has ``num_tokens``."""
        if num_drafts:
            self.num_idle, self.length = 0, FIRST_NAP
            return
        self.num_idle += 1
        if self.num_idle >= PATIENCE:
            self.num_idle, self.until = 0, num_tokens + self.length
            self.length = min(2 * self.length, LONGEST_NAP)


class _Window(NamedTuple):
    """What was proposed for one sequence, and how much of it entered the step."""

    request_id: str
    proposed: tuple[int, ...]
    num_drafts: int


class Speculation:
    """Drafting and its bookkeeping for one engine; used by the engine thread only.

    Args:
        config: Method and knobs.
        max_num_batched_tokens: Rows of a step, drafts included.
        stop_ids: Ids at which the model ends a message.
        vocab_size: Of the model.
        room: How many drafts a sequence has rows for, of a wanted number; as many as wanted when
            absent.
        drafter: In place of the configured method's.
        clock: Seconds; what a step takes is the difference of two readings.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        *,
        max_num_batched_tokens: int,
        stop_ids: Set[int],
        vocab_size: int,
        room: Callable[[Sequence, int], int] | None = None,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._accepted_per_pos = [0] * config.num_speculative_tokens
        self._max_drafts = config.num_speculative_tokens
        self._max_rows = max_num_batched_tokens
        self._room = room
        self._stop_ids, self._vocab_size = stop_ids, vocab_size
        self._drafter = make_drafter(config) if drafter is None else drafter
        self._control = LengthControl(self._max_drafts) if config.adaptive else None
        self._naps: dict[str, _Nap] = {}
        # steps that nobody looks at: still to come, and so far
        self._num_to_skip = self._num_skipped = 0
        self._is_watched = False
        self._clock = clock
        self._began_s = self._drafter_s = 0.0
        self._num_decoding = self._num_prompt_rows = 0
        self._windows: list[_Window] = []

    def attach(self, step: Step) -> Step:
        """Return the step with the drafts that are worth their rows."""
        has_prompts = not step.chunks[-1].is_decode
        # who comes new is looked at
        if self._num_to_skip and not has_prompts:
            self._num_to_skip -= 1
            self._num_skipped += 1
            self._is_watched = False
            return step
        self._is_watched = True
        self._began_s = self._clock()
        self._drafter_s = 0.0
        self._windows = []
        self._num_to_skip = self._num_prompt_rows = 0
        self._num_decoding = len(step.chunks)
        if has_prompts:
            prompts = [c.num_tokens for c in step.chunks if not c.is_decode]
            self._num_decoding -= len(prompts)
            self._num_prompt_rows = sum(prompts)
        if self._control is not None and not self._control.has_credit:
            self._num_to_skip = STEPS_WITHOUT_CREDIT
            return step
        if not self._num_decoding:
            return step
        proposed = [self._look_up(chunk) for chunk in step.chunks]
        lengths = self._lengths(step, proposed)
        chunks = tuple(map(self._with_drafts, step.chunks, proposed, lengths))
        self._windows = [
            _Window(chunk.sequence.request_id, ids or (), len(chunk.drafts))
            for chunk, ids in zip(chunks, proposed, strict=True)
            if chunk.is_decode
        ]
        self._let_nap(chunks, proposed)
        self._drafter_s = self._clock() - self._began_s
        return replace(step, chunks=chunks) if any(lengths) else step

    def record(self, emissions: SequenceOf[Emission], *, is_typical: bool = True) -> None:
        """Learn from the step that `attach` was last called for, once its tokens are committed.

        Args:
            emissions: What sequences got.
            is_typical: False where the step took longer for a reason that does not come again.
        """
        if not self._is_watched:
            return
        ended_s = self._clock()
        rounds, num_emitted, num_drafts = [], 0, 0
        if self._windows:
            emitted = {e.sequence.request_id: e.ids for e in emissions}
            for window in self._windows:
                ids = emitted[window.request_id]
                num_emitted += len(ids)
                num_drafts += window.num_drafts
                if window.proposed:
                    rounds.append(self._round(window, ids))
            self._drafter_s += self._clock() - ended_s
        if self._control is not None:
            step = StepRecord(
                num_decoding=self._num_decoding,
                seconds=self._clock() - self._began_s - self._drafter_s,
                num_prompt_rows=self._num_prompt_rows,
                num_drafts=num_drafts,
                num_emitted=num_emitted,
                num_skipped=self._num_skipped,
                drafter_s=self._drafter_s,
                is_typical=is_typical,
            )
            self._num_skipped = 0
            self._control.record(step, rounds)

    def forget(self, sequence: Sequence, *, has_ended_well: bool) -> None:
        """Drop what is kept of a sequence that has ended; see `Drafter.forget`."""
        self._drafter.forget(sequence, has_ended_well=has_ended_well)
        self._naps.pop(sequence.request_id, None)
        if self._control is not None:
            self._control.forget(sequence.request_id)

    def counts(self) -> dict[str, Any]:
        """Return the counters of `EngineStats`; may be called from any thread."""
        return {
            "num_drafts": self._num_drafts,
            "num_draft_tokens": self._num_draft_tokens,
            "num_accepted_tokens": self._num_accepted_tokens,
            "num_accepted_tokens_per_pos": tuple(self._accepted_per_pos),
        }

    def check(self, running: Set[str]) -> None:
        """Assert that nothing is kept of requests that do not run."""
        assert self._drafter.tracked() <= running, "a drafter remembers an ended request"
        assert self._naps.keys() <= running, "a nap outlives its request"
        if self._control is not None:
            assert self._control.tracked() <= running, "an acceptance outlives its request"

    def _look_up(self, chunk: ScheduledChunk) -> tuple[int, ...] | None:
        """Return what may follow a sequence; None where it naps, or is not or not yet looked at."""
        if not chunk.is_decode:
            return None
        sequence = chunk.sequence
        if self._control is not None:
            nap = self._naps.get(sequence.request_id)
            if nap is not None and sequence.num_tokens < nap.until:
                return None
        return self._propose(sequence) if self._drafter.observe(sequence) else None

    def _let_nap(
        self, chunks: SequenceOf[ScheduledChunk], proposed: SequenceOf[tuple[int, ...] | None]
    ) -> None:
        """Send sequences to sleep that get no drafts, and all of them while all sleep."""
        if self._control is None:
            return
        shortest = LONGEST_NAP
        for chunk, ids in zip(chunks, proposed, strict=True):
            if not chunk.is_decode:
                continue
            sequence = chunk.sequence
            nap = self._naps.setdefault(sequence.request_id, _Nap())
            # the step gives one more token at least
            num_tokens = sequence.num_tokens + 1
            if ids is not None:
                nap.note(len(chunk.drafts), num_tokens)
            shortest = min(shortest, nap.until - num_tokens)
        # whoever has just sent a prompt is looked at next
        self._num_to_skip = 0 if self._num_prompt_rows else max(0, shortest)

    def _round(self, window: _Window, ids: SequenceOf[int]) -> Round:
        """Compare what was proposed with what came, and count what was drafted."""
        pairs = list(zip(window.proposed, ids, strict=False))
        num_matched = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._count(window.num_drafts, min(num_matched, window.num_drafts))
        return Round(window.request_id, num_matched, min(num_matched + 1, len(pairs)))

    def _propose(self, sequence: Sequence) -> tuple[int, ...]:
        left = sequence.max_total_tokens - sequence.num_tokens
        limit = min(self._max_drafts, left - 1)
        if limit >= 1 and self._room is not None:
            limit = self._room(sequence, limit)
        if limit < 1:
            return ()
        sampling = sequence.request.sampling
        stops = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stops = stops | self._stop_ids
        # a stop id needs no row of its own: the row before it decides whether it comes
        return tuple(takewhile(lambda id: id not in stops, self._drafter.propose(sequence, limit)))

    def _lengths(self, step: Step, proposed: SequenceOf[tuple[int, ...] | None]) -> list[int]:
        room = self._max_rows - step.num_tokens
        if self._control is None:
            lengths = []
            for ids in proposed:
                lengths.append(min(room, len(ids or ())))
                room -= lengths[-1]
            return lengths
        if not any(proposed):
            return [0] * len(proposed)
        return self._control.lengths(
            [
                Proposal(chunk.sequence.request_id, len(ids or ()))
                for chunk, ids in zip(step.chunks, proposed, strict=True)
            ],
            num_decoding=self._num_decoding,
            num_prompt_rows=self._num_prompt_rows,
            room=room,
        )

    def _with_drafts(
        self, chunk: ScheduledChunk, proposed: tuple[int, ...] | None, length: int
    ) -> ScheduledChunk:
        if not proposed or not length:
            return chunk
        drafts: SequenceOf[int] = proposed[:length]
        constraint = chunk.sequence.request.constraint
        if drafts and constraint is not None:
            drafts = legal_start(constraint, drafts, self._vocab_size)
        if not drafts:
            return chunk
        return replace(chunk, num_tokens=chunk.num_tokens + len(drafts), drafts=tuple(drafts))

    def _count(self, num_drafts: int, num_accepted: int) -> None:
        if not num_drafts:
            return
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        self._num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self._accepted_per_pos[position] += 1
