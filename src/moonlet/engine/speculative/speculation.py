"""Rounds of speculation: drafts are put into a scheduled step, and what became of them is counted.

`attach` asks the drafter about every decoding sequence and lets the control decide how many of the
drafts enter the step; `record`, after the step, compares what was proposed with what came. Between
the two the runner verifies and the engine emits, as in a step without drafts.

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
from moonlet.engine.speculative.control import LengthControl, Proposal, Round
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
        self._control = LengthControl() if config.adaptive else None
        self._clock = clock
        self._began_s = 0.0
        self._windows: list[_Window] = []
        self._num_prompt_rows = 0

    def attach(self, step: Step) -> Step:
        """Return the step with the drafts that are worth their rows."""
        self._began_s = self._clock()
        proposed: list[tuple[int, ...]] = []
        for chunk in step.chunks:
            is_ready = self._drafter.observe(chunk.sequence)
            ids = self._propose(chunk.sequence) if is_ready and chunk.is_decode else ()
            proposed.append(ids)
        self._num_prompt_rows = sum(c.num_tokens for c in step.chunks if not c.is_decode)
        lengths = self._lengths(step, proposed)
        chunks = tuple(map(self._with_drafts, step.chunks, proposed, lengths))
        self._windows = [
            _Window(chunk.sequence.request_id, ids, len(chunk.drafts))
            for chunk, ids in zip(chunks, proposed, strict=True)
            if chunk.is_decode
        ]
        return replace(step, chunks=chunks) if any(lengths) else step

    def record(self, emissions: SequenceOf[Emission]) -> None:
        """Learn from the step that `attach` was last called for, once its tokens are committed."""
        seconds = self._clock() - self._began_s
        emitted = {e.sequence.request_id: e.ids for e in emissions}
        rounds = []
        for request_id, proposed, num_drafts in self._windows:
            ids = emitted[request_id]
            pairs = list(zip(proposed, ids, strict=False))
            num_matched = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            rounds.append(Round(request_id, num_matched, min(num_matched + 1, len(pairs))))
            self._count(num_drafts, min(num_matched, num_drafts))
        if self._control is not None:
            self._control.record(
                rounds,
                num_decoding=len(self._windows),
                num_prompt_rows=self._num_prompt_rows,
                num_drafts=sum(window.num_drafts for window in self._windows),
                num_emitted=sum(len(emitted[window.request_id]) for window in self._windows),
                seconds=seconds,
            )

    def forget(self, sequence: Sequence, *, has_ended_well: bool) -> None:
        """Drop what is kept of a sequence that has ended; see `Drafter.forget`."""
        self._drafter.forget(sequence, has_ended_well=has_ended_well)
        if self._control is not None:
            self._control.forget(sequence.request_id)

    def counts(self) -> dict[str, Any]:
        """Return the counters of `EngineStats`; may be called from any thread."""
        return {
            "num_drafts": self._num_drafts,
            "num_draft_tokens": self._num_draft_tokens,
            "num_accepted_tokens": self._num_accepted_tokens,
            "accepted_per_pos": tuple(self._accepted_per_pos),
        }

    def check(self, running: Set[str]) -> None:
        """Assert that nothing is kept of requests that do not run."""
        assert self._drafter.tracked() <= running, "a drafter remembers an ended request"
        if self._control is not None:
            assert self._control.tracked() <= running, "an acceptance outlives its request"

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

    def _lengths(self, step: Step, proposed: SequenceOf[tuple[int, ...]]) -> list[int]:
        room = self._max_rows - step.num_tokens
        if self._control is None:
            lengths = []
            for ids in proposed:
                lengths.append(min(room, len(ids)))
                room -= lengths[-1]
            return lengths
        if not any(proposed):
            return [0] * len(proposed)
        return self._control.lengths(
            [
                Proposal(chunk.sequence.request_id, len(ids))
                for chunk, ids in zip(step.chunks, proposed, strict=True)
            ],
            num_decoding=sum(chunk.is_decode for chunk in step.chunks),
            num_prompt_rows=self._num_prompt_rows,
            room=room,
        )

    def _with_drafts(
        self, chunk: ScheduledChunk, proposed: tuple[int, ...], length: int
    ) -> ScheduledChunk:
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
