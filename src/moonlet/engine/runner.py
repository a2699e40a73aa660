"""Runs one scheduled step: one forward pass for prompt chunks and decode rows together."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import torch
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.engine.batch import build_batch
from moonlet.engine.cache.state import PagedState
from moonlet.engine.replay import DecodeReplay
from moonlet.engine.request import Sequence
from moonlet.engine.sampling import Sampled, Sampler
from moonlet.engine.scheduler import Step
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
        replay_decode: Whether decode steps may run from tapes.

    Attributes:
        num_forward_calls: Forward passes so far.
    """

    def __init__(
        self, model: EngineModel, state: PagedState, *, replay_decode: bool = True
    ) -> None:
        self.model = model
        self.state = state
        self.sampler = Sampler(model.config.vocab_size, model.device)
        self.num_forward_calls = 0
        self._replay = DecodeReplay(model, state, replay_decode and model.device.type == "cpu")

    @property
    def num_replays(self) -> int:
        """Forward passes that were run from a tape."""
        return self._replay.num_replays

    @torch.inference_mode()
    def execute(self, step: Step) -> list[tuple[Sequence, Sampled]]:
        """Run the step and choose the next id of every sequence whose tokens are all computed.

        Raises:
            Exception: Whatever the model raised; call `abandon` and end the step's sequences.
        """
        for sequence in step.admitted:
            assert sequence.slot is not None
            self.state.bind(sequence.slot, sequence.pages)
        self.num_forward_calls += 1
        logits_QW = self._replay.logits(step)
        if logits_QW is not None:
            owners = [chunk.sequence for chunk in step.chunks]
            return self._sampled(logits_QW, owners)
        batch = build_batch(step, self.model.device)
        hidden_TD = self.model.forward(batch.tokens_T, batch.meta, self.state)
        if not batch.sampled:
            return []
        logits_QW = self.model.logits(hidden_TD.index_select(0, batch.meta.logits_at_Q))
        return self._sampled(logits_QW, batch.sampled)

    def _sampled(
        self, logits_QW: Tensor, owners: SequenceOf[Sequence]
    ) -> list[tuple[Sequence, Sampled]]:
        return list(zip(owners, self.sampler.sample(logits_QW, owners), strict=True))

    def abandon(self) -> None:
        """Clean up after a step that raised."""
        self.state.discard()

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that is about to end; it still knows its slot, if it has one."""
        if sequence.slot is not None:
            self.state.release(sequence.slot)
        self.sampler.forget(sequence)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that bound pages and remembered penalties belong to running sequences."""
        self.state.check()
        running = list(running)
        assert self.sampler.tracked() <= {s.request_id for s in running}, "penalties outlive"
        bound = {slot for slot in range(1, self.state.num_slots + 1) if self.state.pages_of(slot)}
        assert bound == {s.slot for s in running if s.slot is not None}, "bound slots differ"
        for sequence in running:
            if sequence.slot is not None:
                assert self.state.pages_of(sequence.slot) == sequence.pages
