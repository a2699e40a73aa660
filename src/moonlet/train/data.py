"""The stream of training documents: deterministic, sharded, resumable.

A sample source maps (seed, index, progress) to one document, without hidden state. Logical
shard ``s`` of ``n`` draws the indices s, s + n, s + 2n, ...; a process owns whole shards. What a
step trains on therefore depends on the recipe only, never on the number of processes, and a
cursor per shard is all that a checkpoint needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonlet.core.errors import ConfigError
from moonlet.train.packing import Document

__all__ = ["SampleSource", "ShardStream"]

SampleSource = Callable[[int, int, float], tuple[Sequence[int], Sequence[bool]]]
"""``source(seed, index, progress) -> (ids, mask)``; progress runs from 0 to 1 over the run."""


@dataclass(slots=True)
class ShardStream:
    """Documents of one logical shard.

    Attributes:
        source: Where samples come from.
        seed: First argument of the source.
        shard: Number of this shard.
        num_shards: Shards of the run.
        position: Samples drawn so far; the cursor of checkpoints.
    """

    source: SampleSource
    seed: int
    shard: int
    num_shards: int
    position: int = 0

    def take(self, token_budget: int, progress: float) -> list[Document]:
        """Draw documents until the next one would exceed the budget.

        The document that does not fit is drawn again by the next call, so none is lost.

        Args:
            token_budget: Tokens of this shard and step.
            progress: Position in the run, in [0, 1).

        Raises:
            ConfigError: A single document is longer than the budget.
        """
        documents: list[Document] = []
        left = token_budget
        while True:
            index = self.shard + self.num_shards * self.position
            ids, mask = self.source(self.seed, index, progress)
            if len(ids) > left:
                break
            documents.append(Document(tuple(ids), tuple(mask)))
            left -= len(ids)
            self.position += 1
        if not documents:
            raise ConfigError(
                f"sample {index} has {len(ids)} tokens, more than the budget of {token_budget}; "
                "raise data.tokens_per_step"
            )
        return documents
