"""From a schedule to what the model reads: packed tokens, `BatchMeta`, and who is sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonlet.engine.request import Sequence
from moonlet.engine.step import Step
from moonlet.model.state import BatchMeta

__all__ = ["Batch", "build_batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass.

    Attributes:
        tokens_T: int64 ids of all chunks, one after the other.
        meta: Borders, slots, positions, and the rows whose logits are wanted.
        sampled: Owners of those rows: one row each, and one more per draft.
        drafts: Drafts of each owner.
    """

    tokens_T: Tensor
    meta: BatchMeta
    sampled: tuple[Sequence, ...]
    drafts: tuple[tuple[int, ...], ...]


def build_batch(step: Step, device: torch.device | str = "cpu") -> Batch:
    """Pack the step's chunks in their order; logits only where a token will be sampled."""
    tokens: list[int] = []
    logits_at: list[int] = []
    sampled: list[Sequence] = []
    drafts: list[tuple[int, ...]] = []
    for chunk in step.chunks:
        sequence, stop = chunk.sequence, chunk.start + chunk.num_tokens
        tokens.extend(sequence.token_range(chunk.start, stop - len(chunk.drafts)))
        tokens.extend(chunk.drafts)
        if chunk.needs_logits:
            logits_at.extend(range(len(tokens) - len(chunk.drafts) - 1, len(tokens)))
            sampled.append(sequence)
            drafts.append(chunk.drafts)
    slots = [chunk.sequence.slot for chunk in step.chunks]
    meta = BatchMeta.build(
        [chunk.num_tokens for chunk in step.chunks],
        slots=[slot for slot in slots if slot is not None],
        start_positions=[chunk.start for chunk in step.chunks],
        tentative=[bool(chunk.drafts) for chunk in step.chunks],
        logits=logits_at,
        device=device,
    )
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=device)
    return Batch(tokens_T, meta, tuple(sampled), tuple(drafts))
