"""Native sampling: O(W) for a row of W logits, without a sort and without a row of probabilities.

Ids are those of `reference.sample` for equal uniform numbers, up to rounding at exact borders: sums
run in another order, which moves them by less than 1e-11 of the total, and weights differ by less
than 1e-12 of themselves. Only a draw, a top-p border or a min-p border closer than that may fall to
its other side, as may equal logits whose count times top-p is a whole number: the count is then
exact here. Equal logits have equal weights, so ties are ties. The result does not depend on the
number of threads nor on the other rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.sample.reference import Filters
from moonlet.kernels.spec import Spec

__all__ = ["refusal", "sample"]


def refusal(spec: Spec) -> str | None:
    """Return why native sampling cannot serve, or None: logits are float32 in every model."""
    return _native_ops.refusal(dataclasses.replace(spec, dtype=torch.float32, is_inference=True))


def sample(logits_MW: Tensor, filters: Filters, uniforms: Sequence[float]) -> Tensor:
    """Arguments and result as in `reference.sample`.

    Raises:
        ShapeError: Logits are not float32, or parameters or uniforms are not one per row.
    """
    rows, size = logits_MW.shape
    _native_ops.require("logits", logits_MW, torch.float32, rows, size)
    columns = (filters.temperature_M1, filters.min_p_M1, filters.top_k_M1, filters.top_p_M1)
    for column_M1 in columns:
        if column_M1 is not None:
            _native_ops.require("filter", column_M1, torch.float64, rows, 1)
    if len(uniforms) != rows:
        raise ShapeError(f"{len(uniforms)} uniform numbers for {rows} rows")
    ids_M = torch.empty(rows, dtype=torch.int64)
    num_threads = torch.get_num_threads()
    groups = num_threads if rows >= num_threads else 1
    scratch = torch.empty(groups, 3 * size + 64, dtype=torch.float64)
    _native_ops.call(
        "sample",
        *(logits_MW.contiguous(), *columns, torch.tensor(uniforms, dtype=torch.float64)),
        *(ids_M, scratch, groups, rows, size),
    )
    return ids_M
