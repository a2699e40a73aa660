"""Decode steps run from a tape: every native call of the step, prepared once per batch size.

On a small model most of a decode step is Python preparing native calls. In a step that only decodes
nothing changes from token to token but ids, slots, lengths and pages, which stay in tensors of
fixed place here; so the first step of each batch size is recorded while it runs (`kernels.tape`)
and later ones are replayed. A step that computes anything in torch (the reference backends, another
device) cannot be recorded and goes on call by call, as does one whose memory is too large to keep.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from itertools import chain
from operator import is_not
from typing import Protocol

import torch
from torch import Tensor

from moonlet.engine.cache.arenas import StepIndex
from moonlet.engine.cache.state import PagedState
from moonlet.engine.request import Sequence
from moonlet.engine.step import Step
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.tape import Tape
from moonlet.model.state import BatchMeta, ModelState

__all__ = ["DecodeReplay"]

logger = logging.getLogger(__name__)

MAX_BYTES = 128 << 20
_COLUMNS = ("token", "slot", "start", "length", "row")


class _Model(Protocol):
    """What is recorded."""

    def forward(self, tokens_T: Tensor, meta: BatchMeta, state: ModelState) -> Tensor: ...

    def logits(self, hidden_QD: Tensor) -> Tensor: ...


class _DecodeStep:
    """A decode step of one batch size, its inputs in tensors that never move."""

    def __init__(self, model: _Model, state: PagedState, num_seqs: int) -> None:
        self._model, self._state = model, state
        # written by Python, read by native code: an array takes values faster than a tensor
        self._numbers = array("q", bytes(8 * len(_COLUMNS) * num_seqs))
        rows = torch.frombuffer(self._numbers, dtype=torch.int64).view(len(_COLUMNS), num_seqs)
        tokens_T, slots_S, starts_S, lengths_S, rows_T = rows.unbind()
        self._tokens_T, self._slots_S = tokens_T, slots_S
        self._table_SB = torch.zeros(num_seqs, state.pages_per_seq, dtype=torch.int64)
        self._meta = BatchMeta(
            ragged=Ragged.build([1] * num_seqs),
            slots_S=slots_S,
            start_positions_S=starts_S,
            is_decode=(True,) * num_seqs,
            tentative=(False,) * num_seqs,
            logits_at_Q=torch.arange(num_seqs),
        )
        self._index = StepIndex(
            meta=self._meta,
            fresh_S=None,
            settled_S=None,
            rows_T=rows_T,
            table_SB=self._table_SB,
            lengths_S=lengths_S,
        )
        self._owners: list[Sequence] = []
        self._version = -1
        self._logits_SW: Tensor | None = None
        self.tape = Tape()

    @property
    def num_bytes(self) -> int:
        """Memory that the step keeps between its runs."""
        return self.tape.num_bytes + 8 * len(self._numbers) + self._table_SB.nbytes

    def fill(self, step: Step) -> None:
        """Take over the step's tokens and where its sequences lie."""
        page_size, columns = self._state.page_size, []
        for chunk in step.chunks:
            sequence, start = chunk.sequence, chunk.start
            assert sequence.slot is not None
            row = sequence.pages[start // page_size] * page_size + start % page_size
            (token,) = sequence.token_range(start, start + 1)
            columns.append((token, sequence.slot, start, start + 1, row))
        self._numbers[:] = array("q", chain.from_iterable(zip(*columns, strict=True)))
        owners = [chunk.sequence for chunk in step.chunks]
        is_other = len(owners) != len(self._owners) or any(map(is_not, owners, self._owners))
        if is_other or self._version != self._state.version:
            self._state.copy_tables(self._slots_S, self._table_SB)
            self._owners, self._version = owners, self._state.version

    def run(self) -> Tensor:
        """Return the logits ``[S, W]``; they are valid until the next run."""
        if self._logits_SW is not None:
            self.tape.replay()
            return self._logits_SW
        _ = self._meta.parts  # index arithmetic of the batch, the same in every step
        self._state.use(self._index)
        with self.tape.recording():
            hidden_SD = self._model.forward(self._tokens_T, self._meta, self._state)
            self._logits_SW = self._model.logits(hidden_SD)
        return self._logits_SW


class DecodeReplay:
    """Runs steps that only decode, from a tape where that is possible.

    Args:
        model: What is run, in inference mode; its weights do not change.
        state: Memory of the sequences.
        is_enabled: False runs every step call by call.

    Attributes:
        num_replays: Steps that were run from a tape.
    """

    def __init__(self, model: _Model, state: PagedState, is_enabled: bool) -> None:
        self.num_replays = 0
        self._model, self._state = model, state
        self._is_enabled = is_enabled
        self._steps: OrderedDict[tuple[int, int], _DecodeStep] = OrderedDict()
        self._refusals: dict[tuple[int, int], str] = {}

    def logits(self, step: Step) -> Tensor | None:
        """Run the step and return ``logits_SW`` of its sequences, valid until the next step.

        None, and nothing has run, where the step must be run call by call.
        """
        # a tape holds the number of threads that its calls were made with
        key = (len(step.chunks), torch.get_num_threads())
        if not (self._is_enabled and all(chunk.is_decode for chunk in step.chunks)):
            return None
        if key in self._refusals:
            return None
        known = self._steps.get(key)
        if known is not None:
            self._steps.move_to_end(key)
            known.fill(step)
            self.num_replays += 1
            return known.run()
        fresh = _DecodeStep(self._model, self._state, len(step.chunks))
        fresh.fill(step)
        logits_SW = fresh.run()
        self._keep(key, fresh)
        return logits_SW

    def _keep(self, key: tuple[int, int], fresh: _DecodeStep) -> None:
        reason = fresh.tape.refusal
        if reason is None and fresh.num_bytes > MAX_BYTES:
            reason = f"a tape would keep {fresh.num_bytes / 2**20:.0f} MiB"
        if reason is not None:
            self._refusals[key] = reason
            logger.info("decode steps of %d sequences run call by call: %s", key[0], reason)
            return
        self._steps[key] = fresh
        while sum(step.num_bytes for step in self._steps.values()) > MAX_BYTES:
            self._steps.popitem(last=False)
