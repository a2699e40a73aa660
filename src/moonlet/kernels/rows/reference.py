"""Operators on whole rows: the token table, the residual sum, the output gate of Gated MLA.

Letters: T packed rows, D row width, W vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["add", "embed", "sigmoid_gate"]


def embed(ids_T: Tensor, table_WD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of a table as ``[T, D]``.

    Args:
        ids_T: int64 row numbers.
        table_WD: Of ``dtype``, or coarser as stored.
        dtype: Of the result.

    Raises:
        IndexError: An id is not in the table.
    """
    return F.embedding(ids_T, table_WD).to(dtype)


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two tensors of one shape and dtype."""
    return a + b


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)`` of two tensors of one shape and dtype (model.md section 3.4)."""
    return x * torch.sigmoid(gate)
