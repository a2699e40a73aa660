"""From chosen ids to what a request gets in one step: its tokens, and perhaps its end.

A plain step chooses one id per sequence, a verification window several. They become part of the
sequence one after the other, and the first one that ends it drops the rest, so a request sees the
same with and without speculation (speculative.md section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass

from moonlet.engine.request import FinishReason, Sequence, TokenLogprobs, TokenOutput
from moonlet.engine.sampling import Sampled, Sampler
from moonlet.engine.scheduler import Scheduler
from moonlet.engine.stopping import finish_after

__all__ = ["Emission", "emit"]


@dataclass(slots=True)
class Emission:
    """What one sequence gets in one step.

    Attributes:
        ids: Tokens that are now part of the sequence and are delivered.
        logprobs: One entry per id where the request asked for them.
        finish: Why the sequence ends, if it does.
        error: What went wrong where ``finish`` is ``"error"``.
    """

    sequence: Sequence
    ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None = None
    error: str | None = None

    def output(self) -> TokenOutput:
        """Return what the caller reads."""
        logprobs = tuple(self.logprobs) if self.logprobs else None
        return TokenOutput(tuple(self.ids), logprobs, self.finish, self.error)


def emit(
    sequence: Sequence,
    chosen: SequenceOf[Sampled],
    sampler: Sampler,
    scheduler: Scheduler,
    stop_ids: Set[int],
) -> Emission:
    """Append the chosen ids to the sequence until it ends.

    Args:
        sequence: Its newest token is computed.
        chosen: Ids in order; all but the last are drafts whose rows are computed too.
        sampler: Its penalties and the constraint advance with the ids.
        scheduler: Appends.
        stop_ids: Ids at which the model ends a message.
    """
    emission = Emission(sequence, [], [])
    for position, choice in enumerate(chosen):
        settled = sampler.settle(sequence, choice)
        if settled.error is None:
            if position:
                scheduler.confirm(sequence)
            scheduler.append(sequence, settled.id)
            try:
                emission.finish = finish_after(sequence, settled.id, stop_ids)
            except Exception as error:
                emission.error = f"the constraint failed: {error}"
        else:
            emission.error = settled.error
        if emission.error is not None:
            emission.finish = "error"
            return emission
        emission.ids.append(settled.id)
        if settled.logprobs is not None:
            emission.logprobs.append(settled.logprobs)
        if emission.finish is not None:
            return emission
    return emission
