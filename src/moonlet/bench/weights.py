"""Bytes of a model's weights as they are stored in memory, and those that a step touches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from torch import Tensor, nn

from moonlet.model.latent_moe import Experts, Router
from moonlet.model.transformer import Transformer

__all__ = ["ExpertCount", "bytes_by_dtype", "stored_bytes", "touched_bytes"]


class ExpertCount:
    """Counts the distinct experts of every decode step until `remove`.

    Attributes:
        rows: Only passes of so many rows count; the others hold prompts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows = 0
        self._counts: list[int] = []
        self._handles = [
            module.register_forward_hook(self._record)
            for module in model.modules()
            if isinstance(module, Router)
        ]

    def _record(self, _: nn.Module, __: object, routed: tuple[Tensor, Tensor]) -> None:
        if routed[0].shape[0] == self.rows:
            self._counts.append(len(routed[0].unique()))

    def take(self) -> float:
        """Return the mean per layer and step since the last call."""
        mean = statistics.fmean(self._counts) if self._counts else 0.0
        self._counts.clear()
        return mean

    def remove(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def stored_bytes(model: nn.Module) -> int:
    """Bytes of every parameter and buffer, as stored."""
    return sum(t.nbytes for module in model.modules() for t in _own_tensors(module))


def bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    """Bytes of parameters and buffers per dtype, the most first."""
    counts: dict[str, int] = {}
    for module in model.modules():
        for tensor in _own_tensors(module):
            name = str(tensor.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + tensor.nbytes
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def touched_bytes(model: Transformer, rows: int, distinct_experts: float) -> int:
    """Bytes of weights in memory that one decode step of ``rows`` rows reads.

    Every matrix once; of the token table a row each, of the routed experts those that were chosen.

    Args:
        model: Its weights count in the form in which it stores them.
        rows: Rows of the step.
        distinct_experts: Mean number of different experts per MoE layer.
    """
    table = model.embed_tokens.weight
    total = stored_bytes(model) - table.nbytes + rows * table[0].nbytes
    for module in model.modules():
        if isinstance(module, Experts):
            # matrices, or their packed pairs
            untouched = 1 - distinct_experts / module.num_experts
            total -= round(untouched * sum(t.nbytes for t in _own_tensors(module)))
    return total
