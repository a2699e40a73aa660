"""Decode steps and verification windows run from a tape: every native call, prepared once.

On a small model most of a step is Python preparing native calls. In a step that only decodes
nothing changes from token to token but ids, slots, lengths and pages, which stay in tensors of
fixed place here; so the first step of each shape is recorded while it runs (`kernels.tape`) and
later ones are replayed. A shape is the number of sequences, and of rows where the step has drafts:
how the rows are shared out among the windows is one more tensor. In a step with drafts every
sequence runs as a window, those without drafts as one of a single row, and what keeps the accepted
rows (`commit`) is a tape of its own over the memory of the first.

A step that computes anything in torch (the reference backends, another device) cannot be recorded
and goes on call by call, as does one whose memory is too large to keep.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_not
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moonlet.engine import request
from moonlet.engine.cache.arenas import StepIndex
from moonlet.engine.cache.state import PagedState
from moonlet.engine.cache.windows import KeptRows
from moonlet.engine.step import Step
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.tape import Tape
from moonlet.model.state import BatchMeta, ModelState

__all__ = ["StepReplay"]

logger = logging.getLogger(__name__)

MAX_BYTES = 128 << 20


class _Model(Protocol):
    """What is recorded."""

    def forward(self, tokens_T: Tensor, meta: BatchMeta, state: ModelState) -> Tensor: ...

    def logits(self, hidden_QD: Tensor) -> Tensor: ...


class _Shape(NamedTuple):
    """What a recorded step can be run again for.

    A tape holds the number of threads that its calls were made with.
    """

    num_seqs: int
    num_rows: int
    num_threads: int

    @property
    def has_drafts(self) -> bool:
        return self.num_rows > self.num_seqs

    def __str__(self) -> str:
        if self.has_drafts:
            return f"windows of {self.num_seqs} sequences with {self.num_rows} rows"
        return f"decode steps of {self.num_seqs} sequences"


class _Numbers:
    """Integers of one step, written by Python and read by native code.

    An array takes values faster than a tensor; the columns are views of it.
    """

    def __init__(self, *sizes: int) -> None:
        self._values = array("q", bytes(8 * sum(sizes)))
        self.columns = torch.frombuffer(self._values, dtype=torch.int64).split(sizes)
        self.num_bytes = 8 * len(self._values)

    def fill(self, values: Iterable[int]) -> None:
        """Write all columns, one after the other."""
        self._values[:] = array("q", values)


class _RecordedStep(ABC):
    """A step of one shape, its inputs in tensors that never move."""

    def __init__(
        self, model: _Model, state: PagedState, tokens_T: Tensor, index: StepIndex
    ) -> None:
        self._model, self._state = model, state
        self._tokens_T, self._index, self._meta = tokens_T, index, index.meta
        self._logits_TW: Tensor | None = None
        self.tape = Tape()

    @property
    def num_bytes(self) -> int:
        """Memory that the step keeps between its runs."""
        return self.tape.num_bytes

    @property
    def refusal(self) -> str | None:
        """Why it cannot be run again, or None."""
        return self.tape.refusal

    @abstractmethod
    def fill(self, step: Step) -> None:
        """Take over the step's tokens and where its sequences lie."""

    def run(self) -> Tensor:
        """Return the logits ``[T, W]``; they are valid until the next run."""
        if self._logits_TW is not None:
            self.tape.replay()
            return self._logits_TW
        # index arithmetic of the batch, the same in every step
        _ = self._meta.parts, self._meta.window_parts
        self._state.use(self._index)
        with self.tape.recording():
            hidden_TD = self._model.forward(self._tokens_T, self._meta, self._state)
            self._logits_TW = self._model.logits(hidden_TD)
        return self._logits_TW


class _DecodeStep(_RecordedStep):
    """One token of each sequence."""

    def __init__(self, model: _Model, state: PagedState, num_seqs: int) -> None:
        self._numbers = _Numbers(*[num_seqs] * 5)
        tokens_S, slots_S, starts_S, lengths_S, rows_S = self._numbers.columns
        self._slots_S = slots_S
        self._table_SB = torch.zeros(num_seqs, state.pages_per_seq, dtype=torch.int64)
        meta = BatchMeta(
            ragged=Ragged.build([1] * num_seqs),
            slots_S=slots_S,
            start_positions_S=starts_S,
            is_decode=(True,) * num_seqs,
            tentative=(False,) * num_seqs,
            logits_at_Q=torch.arange(num_seqs),
        )
        index = StepIndex(
            meta=meta,
            fresh_S=None,
            settled_S=None,
            rows_T=rows_S,
            table_SB=self._table_SB,
            lengths_S=lengths_S,
        )
        super().__init__(model, state, tokens_S, index)
        self._owners: list[request.Sequence] = []
        self._version = -1

    @property
    def num_bytes(self) -> int:
        """As in `_RecordedStep`."""
        return self.tape.num_bytes + self._numbers.num_bytes + self._table_SB.nbytes

    def fill(self, step: Step) -> None:
        """As in `_RecordedStep`."""
        page_size, columns = self._state.page_size, []
        for chunk in step.chunks:
            sequence, start = chunk.sequence, chunk.start
            assert sequence.slot is not None
            row = sequence.pages[start // page_size] * page_size + start % page_size
            (token,) = sequence.token_range(start, start + 1)
            columns.append((token, sequence.slot, start, start + 1, row))
        self._numbers.fill(chain.from_iterable(zip(*columns, strict=True)))
        owners = [chunk.sequence for chunk in step.chunks]
        is_other = len(owners) != len(self._owners) or any(map(is_not, owners, self._owners))
        if is_other or self._version != self._state.version:
            self._state.copy_tables(self._slots_S, self._table_SB)
            self._owners, self._version = owners, self._state.version


class _WindowStep(_RecordedStep):
    """Windows of some sequences with a number of rows together, and what keeps their accepted rows.

    Args:
        model: What is run.
        state: Memory of the sequences.
        seq_lens: Rows of the windows of the first run, which is complete without a tape.
    """

    def __init__(self, model: _Model, state: PagedState, seq_lens: Sequence[int]) -> None:
        num_seqs, num_rows = len(seq_lens), sum(seq_lens)
        self._numbers = _Numbers(num_seqs + 1, *[num_seqs] * 3, *[num_rows] * 4)
        borders_S1, slots_S, starts_S, lengths_S, tokens_T, rows_T, seen_T, slots_T = (
            self._numbers.columns
        )
        self._counts = _Numbers(num_seqs)
        pages = state.pages_per_seq
        self._tables = [torch.zeros(n, pages, dtype=torch.int64) for n in (num_seqs, num_rows)]
        self._slots = [slots_S, slots_T]
        meta = BatchMeta(
            ragged=Ragged.over(borders_S1, seq_lens),
            slots_S=slots_S,
            start_positions_S=starts_S,
            is_decode=(True,) * num_seqs,
            tentative=(True,) * num_seqs,
            logits_at_Q=torch.arange(num_rows),
        )
        index = StepIndex(
            meta=meta,
            fresh_S=None,
            settled_S=torch.zeros(0, dtype=torch.int64),
            rows_T=rows_T,
            table_SB=self._tables[0],
            lengths_S=lengths_S,
            table_TB=self._tables[1],
            seen_T=seen_T,
            holds_results=True,
        )
        super().__init__(model, state, tokens_T, index)
        (counts_S,) = self._counts.columns
        self._kept = KeptRows(slots_S=slots_S, counts_S=counts_S, ragged=meta.ragged)
        self._commit_tape: Tape | None = None
        self._owners: list[tuple[request.Sequence, int]] = []
        self._version = -1

    @property
    def num_bytes(self) -> int:
        """As in `_RecordedStep`."""
        tables = sum(table.nbytes for table in self._tables)
        return self.tape.num_bytes + self._numbers.num_bytes + self._counts.num_bytes + tables

    @property
    def refusal(self) -> str | None:
        """As in `_RecordedStep`."""
        return self.tape.refusal or (self._commit_tape.refusal if self._commit_tape else None)

    def fill(self, step: Step) -> None:
        """As in `_RecordedStep`."""
        page_size = self._state.page_size
        borders, slots, starts, lengths = [0], [], [], []
        tokens: list[int] = []
        rows: list[int] = []
        seen: list[int] = []
        slots_of_rows: list[int] = []
        owners = []
        for chunk in step.chunks:
            sequence, start, stop = chunk.sequence, chunk.start, chunk.stop
            assert sequence.slot is not None
            borders.append(borders[-1] + chunk.num_tokens)
            slots.append(sequence.slot)
            starts.append(start)
            lengths.append(stop)
            tokens.extend(sequence.token_range(start, stop - len(chunk.drafts)))
            tokens.extend(chunk.drafts)
            pages = sequence.pages
            rows.extend(
                pages[p // page_size] * page_size + p % page_size for p in range(start, stop)
            )
            seen.extend(range(start + 1, stop + 1))
            slots_of_rows.extend([sequence.slot] * chunk.num_tokens)
            owners.append((sequence, chunk.num_tokens))
        self._numbers.fill(
            (*borders, *slots, *starts, *lengths, *tokens, *rows, *seen, *slots_of_rows)
        )
        if owners != self._owners or self._version != self._state.version:
            for slots_N, table_NB in zip(self._slots, self._tables, strict=True):
                self._state.copy_tables(slots_N, table_NB)
            self._owners, self._version = owners, self._state.version

    def commit(self, num_rows: Sequence[int]) -> None:
        """Keep the first rows of every window of the last run, at least none and at most all."""
        self._counts.fill(num_rows)
        if self._commit_tape is not None:
            self._commit_tape.replay()
            return
        self._commit_tape = Tape()
        with self._commit_tape.recording():
            self._state.commit_rows(self._meta, self._kept)


class StepReplay:
    """Runs steps that only decode, with drafts or without, from a tape where that is possible.

    Args:
        model: What is run, in inference mode; its weights do not change.
        state: Memory of the sequences.
        is_enabled: False runs every step call by call.

    Attributes:
        num_replays: Steps that were run from a tape.
        is_fresh: Whether the last step that ran here was recorded, which takes longer.
    """

    def __init__(self, model: _Model, state: PagedState, is_enabled: bool) -> None:
        self.num_replays = 0
        self.is_fresh = False
        self._model, self._state = model, state
        self._is_enabled = is_enabled
        self._steps: OrderedDict[_Shape, _RecordedStep] = OrderedDict()
        self._refusals: dict[_Shape, str] = {}
        self._refuses_windows = False
        self._open: tuple[_Shape, _WindowStep] | None = None

    def logits(self, step: Step) -> Tensor | None:
        """Run the step and return ``logits_TW`` of all its rows, valid until the next step.

        None, and nothing has run, where the step must be run call by call. After a step with
        drafts follows `commit` or `abandon`.
        """
        self.is_fresh = False
        if not (self._is_enabled and all(chunk.is_decode for chunk in step.chunks)):
            return None
        shape = _Shape(len(step.chunks), step.num_tokens, torch.get_num_threads())
        if shape in self._refusals or (shape.has_drafts and self._refuses_windows):
            return None
        known = self._steps.get(shape)
        if known is not None:
            self._steps.move_to_end(shape)
            self.num_replays += 1
            run = known
        else:
            self.is_fresh = True
            run = self._new(step)
        run.fill(step)
        logits_TW = run.run()
        if isinstance(run, _WindowStep):
            # a window is complete with its commit
            self._open = (shape, run)
        elif known is None:
            self._keep(shape, run)
        return logits_TW

    @property
    def is_open(self) -> bool:
        """Whether windows wait for `commit`."""
        return self._open is not None

    def commit(self, num_rows: Sequence[int]) -> None:
        """Keep of every window of the last step its first rows."""
        assert self._open is not None
        (shape, run), self._open = self._open, None
        run.commit(num_rows)
        if shape not in self._steps:
            self._keep(shape, run)

    def abandon(self) -> None:
        """Forget windows that will not be committed; states are what they were before."""
        self._open = None

    def _new(self, step: Step) -> _RecordedStep:
        seq_lens = [chunk.num_tokens for chunk in step.chunks]
        if step.has_drafts:
            return _WindowStep(self._model, self._state, seq_lens)
        return _DecodeStep(self._model, self._state, len(seq_lens))

    def _keep(self, shape: _Shape, fresh: _RecordedStep) -> None:
        reason = fresh.refusal
        # what computes in one window computes in all
        self._refuses_windows |= shape.has_drafts and reason is not None
        if reason is None and fresh.num_bytes > MAX_BYTES:
            reason = f"a tape would keep {fresh.num_bytes / 2**20:.0f} MiB"
        if reason is not None:
            self._refusals[shape] = reason
            logger.info("%s run call by call: %s", shape, reason)
            return
        self._steps[shape] = fresh
        while sum(step.num_bytes for step in self._steps.values()) > MAX_BYTES:
            self._steps.popitem(last=False)
