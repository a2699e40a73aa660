"""One forward pass as the scheduler sees it: which tokens of which sequences, and what to copy."""

from __future__ import annotations

from dataclasses import dataclass

from moonlet.engine.cache.manager import Restore
from moonlet.engine.request import RequestState, Sequence

__all__ = ["ScheduledChunk", "Step"]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The tokens of one sequence in one step: positions start to start + num_tokens.

    Attributes:
        drafts: Guesses that follow the sequence's own tokens; counted in ``num_tokens``.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether this is the step of a decoding sequence."""
        return self.sequence.state is RequestState.DECODE

    @property
    def needs_logits(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one can be sampled."""
        return self.start + self.num_tokens - len(self.drafts) == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: decoding sequences first, then prompt chunks.

    Attributes:
        chunks: What is computed.
        restores: Sequences that were admitted, with the copies they resume from.
        preempted: Sequences whose memory was taken away, with the slot they had.
    """

    chunks: tuple[ScheduledChunk, ...]
    restores: tuple[Restore, ...] = ()
    preempted: tuple[tuple[Sequence, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks together."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def has_drafts(self) -> bool:
        """Whether any chunk is a verification window."""
        return any(chunk.drafts for chunk in self.chunks)
