"""Next-token loss over the supervised rows of a packed batch."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from moonlet.model.simple_state import NoState
from moonlet.train.packing import PackedBatch

__all__ = ["loss_sum"]


def loss_sum(model: Any, batch: PackedBatch) -> Tensor:
    """Return the summed cross-entropy of the supervised rows.

    Logits are computed for those rows only: the vocabulary product is the largest single
    activation of a small model, and most rows of a chat are prompt.

    Args:
        model: A `Transformer`.
        batch: Packed documents.

    Returns:
        Scalar float32, differentiable; divide by the supervised rows of the whole step.
    """
    hidden_TD = model(batch.tokens_T, batch.meta, NoState(model.config))
    logits_QW = model.logits(hidden_TD.index_select(0, batch.meta.logits_at_Q))
    return F.cross_entropy(logits_QW, batch.labels_Q, reduction="sum")
