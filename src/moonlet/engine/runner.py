"""Runs one scheduled step: one forward pass for prompt chunks and decode rows together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.engine.batch import build_batch
from moonlet.engine.cache.manager import Save
from moonlet.engine.cache.state import PagedState
from moonlet.engine.cache.transfer import SequenceMemory
from moonlet.engine.replay import StepReplay
from moonlet.engine.request import Sequence
from moonlet.engine.sampling import Sampled, Sampler
from moonlet.engine.step import Step
from moonlet.model.state import BatchMeta, ModelState

__all__ = ["EngineModel", "Runner"]


class EngineModel(Protocol):
    """What the engine asks of a model; `model.transformer.Transformer` is one."""

    @property
    def config(self) -> ModelConfig:
        """Architecture, which fixes the shapes of the state."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Model dtype: that of MLA rows and convolution tails."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the parameters live, and the state with them."""
        ...

    def forward(self, tokens_T: Tensor, meta: BatchMeta, state: ModelState) -> Tensor:
        """Return ``hidden_TD`` and leave the batch's tokens in ``state``."""
        ...

    def logits(self, hidden_QD: Tensor) -> Tensor:
        """Return float32 ``logits_QW`` of chosen rows."""
        ...


class Runner:
    """Model, state and sampler of one engine; used by the engine thread only.

    Args:
        model: What is run.
        state: Memory of the running sequences.
        unit_size: Tokens per hash unit of the prefix index.
        replay_decode: Whether steps that only decode may run from tapes.

    Attributes:
        num_forward_calls: Forward passes so far.
    """

    def __init__(
        self, model: EngineModel, state: PagedState, *, unit_size: int, replay_decode: bool = True
    ) -> None:
        self.model = model
        self.state = state
        self.sampler = Sampler(model.config.vocab_size, model.device)
        self.num_forward_calls = 0
        self._unit_size = unit_size
        self._num_bound: dict[int, int] = {}
        # a step with drafts, and its batch where it did not run from a tape
        self._open: tuple[Step, BatchMeta | None] | None = None
        self._replay = StepReplay(model, state, replay_decode and model.device.type == "cpu")

    @property
    def num_replays(self) -> int:
        """Forward passes that were run from a tape."""
        return self._replay.num_replays

    @property
    def was_recorded(self) -> bool:
        """Whether the last step was recorded for later ones, which takes longer."""
        return self._replay.is_fresh

    @torch.inference_mode()
    def execute(self, step: Step) -> list[tuple[Sequence, list[Sampled]]]:
        """Run the step and choose what follows every sequence whose tokens are all computed.

        Nothing is settled yet, and after a step with drafts `commit` must follow.

        Raises:
            Exception: Whatever the model raised; call `abandon` and end the step's sequences.
        """
        self._prepare(step)
        self.num_forward_calls += 1
        logits_QW = self._replay.logits(step)
        if logits_QW is not None:
            owners, drafts = [chunk.sequence for chunk in step.chunks], None
            if step.has_drafts:
                self._open = (step, None)
                drafts = [chunk.drafts for chunk in step.chunks]
            return list(zip(owners, self.sampler.choose(logits_QW, owners, drafts), strict=True))
        batch = build_batch(step, self.model.device)
        if step.has_drafts:
            self._open = (step, batch.meta)
        hidden_TD = self.model.forward(batch.tokens_T, batch.meta, self.state)
        if not batch.sampled:
            return []
        logits_QW = self.model.logits(hidden_TD.index_select(0, batch.meta.logits_at_Q))
        chosen = self.sampler.choose(logits_QW, batch.sampled, batch.drafts)
        return list(zip(batch.sampled, chosen, strict=True))

    @torch.inference_mode()
    def commit(self) -> None:
        """Keep of every window the rows that its sequence now counts as computed."""
        if self._open is None:
            return
        (step, meta), self._open = self._open, None
        kept = [chunk.sequence.num_computed - chunk.start for chunk in step.chunks]
        if meta is None:
            self._replay.commit(kept)
        else:
            self.state.commit(meta, kept)

    @torch.inference_mode()
    def keep(self, save: Save) -> bool:
        """Copy the states of a `Save`; say whether all that it would make findable is finite."""
        sequence, unit = save.sequence, self._unit_size
        start, stop = sequence.num_registered * unit, save.num_units * unit
        is_finite = self.state.are_rows_finite(sequence.pages, start, stop)
        for source, target in zip(sequence.states, save.states, strict=False):
            is_finite = is_finite and self.state.is_slot_finite(source)
            self.state.copy_slot(source, target)
        return is_finite

    def _prepare(self, step: Step) -> None:
        """Bring block tables up to date and resume admitted sequences from their checkpoints."""
        for _, slot in step.preempted:
            self._unbind(slot)
        for restore in step.restores:
            tail, sequence = restore.tail, restore.sequence
            if tail is not None:
                self.state.copy_rows(tail.source, tail.target, tail.num_rows)
            if restore.load is not None:
                assert sequence.slot is not None
                pages, arrived = sequence.pages, restore.load.checkpoint
                memory = SequenceMemory(state=self.state, slot=sequence.slot, pages=pages)
                for start, rows in arrived.pieces(self._unit_size):
                    memory.write_rows(start, rows)
                memory.write_state(arrived.state)
            if restore.kept is not None:
                for source, target in zip(sequence.states, restore.kept.states, strict=False):
                    self.state.copy_slot(source, target)
            if restore.checkpoint is not None:
                pairs = zip(restore.checkpoint.states, sequence.states, strict=True)
                for source, target in pairs:
                    self.state.copy_slot(source, target)
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert sequence.slot is not None
            # pages are only added while a sequence holds its slot
            if self._num_bound.get(sequence.slot) != len(sequence.pages):
                self.state.bind(sequence.slot, sequence.pages)
                self._num_bound[sequence.slot] = len(sequence.pages)

    def capture(self, sequence: Sequence) -> None:
        """Show a sequence's memory to its request, once the prompt is computed and no more."""
        capture = sequence.request.capture
        if capture is not None and sequence.num_computed == len(sequence.prompt_ids):
            capture(sequence, self.state)

    def _unbind(self, slot: int) -> None:
        if self._num_bound.pop(slot, None) is not None:
            self.state.release(slot)

    def abandon(self) -> None:
        """Clean up after a step that raised."""
        self._open = None
        self._replay.abandon()
        self.state.discard()

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that is about to end; it still knows its slot, if it has one."""
        if sequence.slot is not None:
            self._unbind(sequence.slot)
        self.sampler.forget(sequence)

    def check(self, unfinished: Iterable[Sequence]) -> None:
        """Assert that bound pages and remembered penalties belong to sequences that go on."""
        self.state.check()
        assert self._open is None, "a window was not committed"
        unfinished = list(unfinished)
        assert self.sampler.tracked() <= {s.request_id for s in unfinished}, "penalties outlive"
        bound = {slot for slot in range(1, self.state.num_slots + 1) if self.state.pages_of(slot)}
        assert bound == set(self._num_bound)
        owners = {s.slot: s for s in unfinished if s.slot is not None}
        assert bound <= owners.keys(), "a slot is bound without a sequence"
        for slot in bound:
            pages = self.state.pages_of(slot)
            assert pages == owners[slot].pages[: len(pages)], "bound pages differ"
