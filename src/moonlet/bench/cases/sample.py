"""Cases of sampling: one id per sequence, with the temperature alone and with every filter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moonlet.bench import costs
from moonlet.bench.cases.case import MAX_SEQS, Arguments, Case, Shape
from moonlet.kernels.sample.reference import Filters

__all__ = ["sample"]


def _column(values: Tensor) -> Tensor:
    return values.double().unsqueeze(1)


def sample(shape: Shape) -> Iterator[Case]:
    """Logits of one row per sequence."""
    rows, vocab = shape.rows, shape.config.vocab_size
    if rows > MAX_SEQS:
        return

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=shape.generator)

    def make(is_filtered: bool) -> Arguments:
        temperature = _column(uniform(0.5, 1.5))
        filters = Filters(temperature_M1=temperature)
        if is_filtered:
            filters = Filters(
                temperature_M1=temperature,
                min_p_M1=_column(uniform(0.0, 0.05)),
                top_k_M1=_column(1 + shape.integers(vocab, rows)),
                top_p_M1=_column(uniform(0.7, 1.0)),
            )
        return shape.normal(rows, vocab, scale=3), filters, uniform(0.0, 1.0).tolist()

    for label in ("temperature", "filters"):
        yield Case(
            label=label,
            cost=costs.sample(rows, vocab, 4 if label == "filters" else 1),
            make=lambda label=label: make(label == "filters"),
        )
