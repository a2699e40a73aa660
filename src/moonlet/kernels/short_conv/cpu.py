"""The short convolution with its carries for inference in native code."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.short_conv.reference import ShortConvResult
from moonlet.kernels.spec import Spec

__all__ = ["refusal", "short_conv", "short_conv_step"]

MAX_TAPS = 16


def refusal(spec: Spec) -> str | None:
    """Return why the native convolution cannot serve, or None if it can."""
    reason, config = _native_ops.refusal(spec), spec.config
    if reason is not None or config is None or config.kda.short_conv_kernel_size <= MAX_TAPS:
        return reason
    return (
        f"short_conv_kernel_size is {config.kda.short_conv_kernel_size}; "
        f"the native convolution has at most {MAX_TAPS} taps"
    )


def short_conv(
    x_TC: Tensor,
    weight_CJ: Tensor,
    carry_SCW: Tensor,
    ragged: Ragged,
    emit_at_E: Tensor | None = None,
) -> ShortConvResult:
    """Arguments and result as in `reference.short_conv`; float32 and at most 16 taps.

    Raises:
        ShapeError: A shape or dtype differs, there are too many taps, an emitted row is not one of
            the packed rows.
    """
    channels, taps = weight_CJ.shape
    if not 1 <= taps <= MAX_TAPS:
        raise ShapeError(f"weight has {taps} taps; the native convolution has 1 to {MAX_TAPS}")
    rows, carry_shape = ragged.num_rows, (ragged.num_seqs, channels, taps - 1)
    _native_ops.require("x", x_TC, torch.float32, rows, channels)
    _native_ops.require("weight", weight_CJ, torch.float32, channels, taps)
    _native_ops.require("carry", carry_SCW, torch.float32, *carry_shape)
    y_TC = torch.empty((rows, channels), dtype=torch.float32)
    new_SCW = torch.empty(carry_shape, dtype=torch.float32)
    emit = ragged.emit_order(emit_at_E)
    emitted_ECW = None
    if emit is not None:
        emitted_ECW = torch.empty((emit.rows_E.shape[0], *carry_shape[1:]), dtype=torch.float32)
    _native_ops.call(
        "short_conv_f32",
        *(x_TC.contiguous(), weight_CJ.contiguous(), carry_SCW.contiguous()),
        *(ragged.borders_S1, y_TC, new_SCW),
        *((None, None, None, 0) if emit is None else (*emit, emitted_ECW, emit.rows_E.shape[0])),
        *(ragged.num_seqs, channels, taps),
    )
    return ShortConvResult(y_TC, new_SCW, emitted_ECW)


def short_conv_step(
    x_SC: Tensor, weights_CJ: Sequence[Tensor], state_GCW: Tensor, slots_S: Tensor
) -> Tensor:
    """Arguments, result and effect as in `reference.short_conv_step`; float32, at most 16 taps.

    Raises:
        ShapeError: A shape or dtype differs, there are too many taps, the arena is strided.
        BackendError: A slot lies outside the arena; nothing was changed.
    """
    (seqs, channels), taps = x_SC.shape, weights_CJ[0].shape[1]
    if not 1 <= taps <= MAX_TAPS:
        raise ShapeError(f"weight has {taps} taps; the native convolution has 1 to {MAX_TAPS}")
    _native_ops.require("x", x_SC, torch.float32, seqs, channels)
    for weight in weights_CJ:
        _native_ops.require("weight", weight, torch.float32, channels // len(weights_CJ), taps)
    _native_ops.require("state", state_GCW, torch.float32, state_GCW.shape[0], channels, taps - 1)
    _native_ops.require("slots", slots_S, torch.int64, seqs)
    out_SC = torch.empty((seqs, channels), dtype=torch.float32)
    addresses = array("q", [_native_ops.address(weight) for weight in weights_CJ])
    _native_ops.call(
        "short_conv_step_f32",
        *(x_SC.contiguous(), addresses, len(weights_CJ), state_GCW, slots_S, out_SC),
        *(state_GCW.shape[0], seqs, channels, taps),
    )
    return out_SC
