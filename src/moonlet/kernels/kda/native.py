"""Chunkwise KDA in native code, forward and backward (training.md section 5).

The forward keeps the state entering each chunk of 32 rows; the backward recomputes the rest.
Serves the lower-bound gate; emitted states come from `chunkwise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_training
from moonlet.kernels.kda import chunkwise
from moonlet.kernels.kda.reference import KDAResult
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.spec import Spec

__all__ = ["kda_chunk", "refusal"]

CHUNK_ROWS = 32
# a chunk's decays around its middle row span half of it; e^80 is inside float32
LOWEST_BOUND = -5.0


def refusal(spec: Spec) -> str | None:
    """Return why native KDA cannot serve, or None if it can."""
    reason, config = _native_training.refusal(spec), spec.config
    if reason is not None or config is None:
        return reason
    bound = config.kda.gate_lower_bound
    if bound is None or bound < LOWEST_BOUND:
        return f"gate_lower_bound is {bound}; native KDA needs at least {LOWEST_BOUND}"
    if config.kda.head_dim > _native_training.MAX_HEAD_SIZE:
        return f"head_dim is {config.kda.head_dim}; native KDA has at most 128"
    return None


class _ChunkKDA(torch.autograd.Function):
    """Inputs in the order of the reference; returns output and final states."""

    @staticmethod
    def forward(
        ctx: Any, lower_bound: float, ragged: Ragged, state_SHKV: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        v_THV = inputs[2]
        num_seqs, heads, key_size, value_size = state_SHKV.shape
        starts = _native_training.run_starts(ragged.seq_lens)
        o_THV, final_SHKV = torch.empty_like(v_THV), torch.empty_like(state_SHKV)
        entering: Tensor | None = None
        if any(ctx.needs_input_grad):
            chunks = sum(-(-n // CHUNK_ROWS) for n in ragged.seq_lens)
            entering = state_SHKV.new_empty(chunks, heads, key_size, value_size)
        _native_training.call(
            "kda_forward",
            *(*inputs, lower_bound, state_SHKV, starts, o_THV, final_SHKV, entering),
            *(num_seqs, heads, key_size, value_size),
        )
        ctx.save_for_backward(starts, entering, *inputs)
        ctx.lower_bound = lower_bound
        return o_THV, final_SHKV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        starts, entering, *inputs = ctx.saved_tensors
        do_THV, dfinal_SHKV = (x.contiguous() for x in gradients)
        a_log_H, dt_bias_HK = inputs[5], inputs[6]
        row_gradients = [torch.empty_like(x) for x in inputs[:5]]
        da_log_H, ddt_bias_HK = torch.zeros_like(a_log_H), torch.zeros_like(dt_bias_HK)
        dstate_SHKV = torch.empty_like(dfinal_SHKV)
        num_seqs, heads, key_size, value_size = dfinal_SHKV.shape
        _native_training.call(
            "kda_backward",
            *(*inputs, ctx.lower_bound, starts, entering, do_THV, dfinal_SHKV),
            *(*row_gradients, da_log_H, ddt_bias_HK, dstate_SHKV),
            *(num_seqs, heads, key_size, value_size),
        )
        return None, None, dstate_SHKV, *row_gradients, da_log_H, ddt_bias_HK


def kda_chunk(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    beta_logits_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    state_SHKV: Tensor,
    ragged: Ragged,
    emit_at_E: Tensor | None = None,
) -> KDAResult:
    """Arguments and result as in `reference.kda_chunk`; float32 and the bounded gate only."""
    inputs = (q_THK, k_THK, v_THV, z_THK, beta_logits_TH, A_log_H, dt_bias_HK)
    if lower_bound is None or lower_bound < LOWEST_BOUND:
        raise ShapeError(f"native KDA needs a gate bound in [{LOWEST_BOUND}, 0), got {lower_bound}")
    if emit_at_E is not None:
        return chunkwise.kda_chunk(*inputs, lower_bound, state_SHKV, ragged, emit_at_E)
    _require_shapes(inputs, state_SHKV, ragged)
    packed = [x.contiguous() for x in inputs]
    o_THV, final = _ChunkKDA.apply(lower_bound, ragged, state_SHKV.contiguous(), *packed)
    return KDAResult(o_THV, final, None)


def _require_shapes(inputs: tuple[Tensor, ...], state_SHKV: Tensor, ragged: Ragged) -> None:
    """Check everything against the state's sizes and the number of rows."""
    rows, (heads, key_size, value_size) = ragged.num_rows, state_SHKV.shape[1:]
    key, value = (rows, heads, key_size), (rows, heads, value_size)
    names = ("q", "k", "v", "z", "beta", "A_log", "dt_bias")
    shapes = (key, key, value, key, (rows, heads), (heads,), (heads, key_size))
    for name, tensor, shape in zip(names, inputs, shapes, strict=True):
        _native_training.require_shape(name, tensor, *shape)
    state = (ragged.num_seqs, heads, key_size, value_size)
    _native_training.require_shape("state", state_SHKV, *state)
