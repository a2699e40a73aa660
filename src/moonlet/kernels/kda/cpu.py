"""Kimi Delta Attention for inference in native code: `kda_step` in place, `kda_chunk`.

Both gates, float32, heads shared out to threads. Rows of q, k and v may lie apart, as they do in
the output of one convolution over all three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.kda.reference import KDAResult
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.spec import Spec

__all__ = ["SIZES", "is_served", "kda_chunk", "kda_step", "refusal"]

SIZE_STEP, MAX_SIZE = 16, 256
SIZES = f"native KDA needs head sizes that are multiples of {SIZE_STEP} up to {MAX_SIZE}"


def is_served(size: int) -> bool:
    """Return whether the native kernels have heads of this width."""
    return 0 < size <= MAX_SIZE and size % SIZE_STEP == 0


def refusal(spec: Spec) -> str | None:
    """Return why native KDA cannot serve, or None if it can."""
    reason, config = _native_ops.refusal(spec), spec.config
    if reason is not None or config is None or is_served(config.kda.head_dim):
        return reason
    return (
        f"head_dim is {config.kda.head_dim}; native KDA needs a multiple of {SIZE_STEP} "
        f"up to {MAX_SIZE}"
    )


class _Inputs:
    """Checked inputs; keeps the tensors alive whose addresses it gives."""

    def __init__(
        self,
        rows: int,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        lower_bound: float | None,
        state: Tensor,
    ) -> None:
        q, k, v, z, beta, a_log, dt_bias = tensors
        if state.dim() != 4 or not (is_served(state.shape[2]) and is_served(state.shape[3])):
            raise ShapeError(f"state has shape {list(state.shape)}; {SIZES}")
        if lower_bound is not None and lower_bound >= 0:
            raise ShapeError(f"lower_bound is {lower_bound}; it must be negative or absent")
        self.sizes = heads, key, value = state.shape[1], state.shape[2], state.shape[3]
        for name, tensor, width in (("q", q, key), ("k", k, key), ("v", v, value), ("z", z, key)):
            _native_ops.require(name, tensor, torch.float32, rows, heads, width)
        _native_ops.require("beta", beta, torch.float32, rows, heads)
        _native_ops.require("A_log", a_log, torch.float32, heads)
        _native_ops.require("dt_bias", dt_bias, torch.float32, heads, key)
        self._rows = tuple(_with_plain_rows(x) for x in (q, k, v, z))
        self._others = (beta.contiguous(), a_log.contiguous(), dt_bias.contiguous())
        self._bound = 0.0 if lower_bound is None else lower_bound

    @property
    def arguments(self) -> tuple[Tensor | int | float, ...]:
        """Addresses of the rows, the other inputs, the gate bound."""
        return (*(x.data_ptr() for x in self._rows), *self._others, self._bound)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between rows of q, k, v, z."""
        return tuple(max(x.stride(0), x.shape[1] * x.shape[2]) for x in self._rows)


def _with_plain_rows(x_THK: Tensor) -> Tensor:
    """Return the tensor if each row is contiguous and rows do not overlap, else a copy."""
    if x_THK.device.type != "cpu":
        raise ShapeError(f"native KDA runs on the CPU, got a tensor on {x_THK.device}")
    rows, heads, width = x_THK.shape
    is_plain = x_THK.stride(2) == 1 and (heads == 1 or x_THK.stride(1) == width)
    if is_plain and (rows == 1 or x_THK.stride(0) >= heads * width):
        return x_THK
    return x_THK.contiguous()


def kda_step(
    q_SHK: Tensor,
    k_SHK: Tensor,
    v_SHV: Tensor,
    z_SHK: Tensor,
    beta_logits_SH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    state_GHKV: Tensor,
    slots_S: Tensor,
) -> Tensor:
    """Arguments, result and effect as in `reference.kda_step`; float32 only.

    Raises:
        ShapeError: A shape or dtype differs, a head size is not served, the arena is strided.
        BackendError: A slot lies outside the arena; nothing was changed.
    """
    seqs = slots_S.shape[0]
    tensors = (q_SHK, k_SHK, v_SHV, z_SHK, beta_logits_SH, A_log_H, dt_bias_HK)
    _native_ops.require("state", state_GHKV, torch.float32, *state_GHKV.shape)
    _native_ops.require("slots", slots_S, torch.int64, seqs)
    inputs = _Inputs(seqs, tensors, lower_bound, state_GHKV)
    o_SHV = torch.empty(v_SHV.shape, dtype=torch.float32)
    _native_ops.call(
        "kda_step_f32",
        *(*inputs.arguments, state_GHKV, slots_S.contiguous(), o_SHV),
        *(*inputs.strides, state_GHKV.shape[0], seqs, *inputs.sizes),
    )
    return o_SHV


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
    """Arguments and result as in `reference.kda_chunk`; float32 only.

    Raises:
        ShapeError: A shape or dtype differs, a head size is not served, an emitted row is not one
            of the packed rows.
    """
    rows = ragged.num_rows
    tensors = (q_THK, k_THK, v_THV, z_THK, beta_logits_TH, A_log_H, dt_bias_HK)
    inputs = _Inputs(rows, tensors, lower_bound, state_SHKV)
    state_SHKV = state_SHKV.contiguous()
    _native_ops.require("state", state_SHKV, torch.float32, ragged.num_seqs, *inputs.sizes)
    o_THV = torch.empty(v_THV.shape, dtype=torch.float32)
    final_SHKV = torch.empty(state_SHKV.shape, dtype=torch.float32)
    emit = ragged.emit_order(emit_at_E)
    emitted_EHKV = None
    if emit is not None:
        emitted_EHKV = torch.empty((emit.rows_E.shape[0], *inputs.sizes), dtype=torch.float32)
    _native_ops.call(
        "kda_chunk_f32",
        *(*inputs.arguments, state_SHKV, ragged.borders_S1, o_THV, final_SHKV),
        *((None, None) if emit is None else emit),
        *(emitted_EHKV, *inputs.strides, 0 if emit is None else emit.rows_E.shape[0]),
        *(ragged.num_seqs, *inputs.sizes),
    )
    return KDAResult(o_THV, final_SHKV, emitted_EHKV)
