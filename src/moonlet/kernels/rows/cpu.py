"""Embedding, sum and sigmoid gate of whole rows in native code, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops

__all__ = ["add", "embed", "sigmoid_gate"]


def embed(ids_T: Tensor, table_WD: Tensor, dtype: torch.dtype) -> Tensor:
    """Arguments and result as in `reference.embed`; the table is float32 or bfloat16.

    Raises:
        ShapeError: Another dtype, or the ids are no int64 list.
        BackendError: An id is not in the table.
    """
    entries, size = table_WD.shape
    is_bf16 = table_WD.dtype == torch.bfloat16
    stored = torch.bfloat16 if is_bf16 else torch.float32
    if dtype != torch.float32:
        raise ShapeError(f"the native kernel returns float32, not {dtype}")
    _native_ops.require("ids", ids_T, torch.int64, ids_T.numel())
    _native_ops.require("table", table_WD, stored, entries, size)
    out_TD = torch.empty(ids_T.shape[0], size, dtype=torch.float32)
    _native_ops.call("embed", ids_T, table_WD, int(is_bf16), out_TD, ids_T.shape[0], entries, size)
    return out_TD


def add(a: Tensor, b: Tensor) -> Tensor:
    """Arguments and result as in `reference.add`; float32.

    Raises:
        ShapeError: Another dtype, or the shapes differ.
    """
    return _pairwise("add_f32", a, b)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Arguments and result as in `reference.sigmoid_gate`; float32.

    Raises:
        ShapeError: Another dtype, or the shapes differ.
    """
    return _pairwise("sigmoid_gate_f32", x, gate)


def _pairwise(name: str, a: Tensor, b: Tensor) -> Tensor:
    _native_ops.require("the first input", a, torch.float32, *a.shape)
    _native_ops.require("the second input", b, torch.float32, *a.shape)
    out = torch.empty(a.shape, dtype=torch.float32)
    if out.numel():
        _native_ops.call(name, a.contiguous(), b.contiguous(), out, out.numel())
    return out
