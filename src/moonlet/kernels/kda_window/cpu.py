"""Verification windows of KDA in native code: one call for all windows of a batch.

Every row takes the kernels of a plain decode step, on a copy of one head's state at a time that
stays in cache over the window's rows; `kda_replay` runs the same on the state where it lies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.kda import cpu as kda
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.short_conv import cpu as short_conv
from moonlet.kernels.spec import Spec

__all__ = ["kda_replay", "kda_window", "refusal"]


def refusal(spec: Spec) -> str | None:
    """Return why the native kernels cannot serve, or None if they can."""
    return kda.refusal(spec) or short_conv.refusal(spec)


def kda_window(
    raw_TC: Tensor,
    weights_CJ: Sequence[Tensor],
    z_THK: Tensor,
    beta_logits_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    state_GHKV: Tensor,
    conv_GCW: Tensor,
    slots_S: Tensor,
    ragged: Ragged,
) -> Tensor:
    """Arguments and result as in `reference.kda_window`; float32 only.

    Raises:
        ShapeError: A shape or dtype differs, a head size or a number of taps is not served, an
            arena is strided.
        BackendError: A slot lies outside the arenas.
    """
    memory = (state_GHKV, conv_GCW, slots_S)
    gates = (A_log_H, dt_bias_HK, lower_bound)
    rows = (raw_TC, z_THK, beta_logits_TH)
    first, sizes = _arguments(rows, weights_CJ, gates, memory, ragged)
    o_THV = torch.empty((ragged.num_rows, sizes[2], sizes[4]), dtype=torch.float32)
    _native_ops.call("kda_window_f32", *first, o_THV, *sizes)
    return o_THV


def kda_replay(
    raw_TC: Tensor,
    weights_CJ: Sequence[Tensor],
    z_THK: Tensor,
    beta_logits_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    state_GHKV: Tensor,
    conv_GCW: Tensor,
    slots_S: Tensor,
    ragged: Ragged,
    counts_S: Tensor,
) -> None:
    """Arguments and effect as in `reference.kda_replay`; float32 only.

    Raises:
        ShapeError: As in `kda_window`; nothing was changed.
        BackendError: A slot lies outside the arenas, a count exceeds its window; nothing was
            changed.
    """
    memory = (state_GHKV, conv_GCW, slots_S)
    gates = (A_log_H, dt_bias_HK, lower_bound)
    rows = (raw_TC, z_THK, beta_logits_TH)
    first, sizes = _arguments(rows, weights_CJ, gates, memory, ragged)
    _native_ops.require("counts", counts_S, torch.int64, ragged.num_seqs)
    _native_ops.call("kda_replay_f32", *first, counts_S, *sizes)


def _arguments(
    rows: tuple[Tensor, Tensor, Tensor],
    weights_CJ: Sequence[Tensor],
    gates: tuple[Tensor, Tensor, float | None],
    memory: tuple[Tensor, Tensor, Tensor],
    ragged: Ragged,
) -> tuple[tuple[_native_ops.Argument, ...], tuple[int, ...]]:
    """Check everything; return the inputs with the borders, and slots, sequences and sizes."""
    (raw_TC, z_THK, beta_TH), (a_log, dt_bias, lower_bound) = rows, gates
    state_GHKV, conv_GCW, slots_S = memory
    if state_GHKV.dim() != 4 or not all(map(kda.is_served, state_GHKV.shape[2:])):
        raise ShapeError(f"state has shape {list(state_GHKV.shape)}; {kda.SIZES}")
    if lower_bound is not None and lower_bound >= 0:
        raise ShapeError(f"lower_bound is {lower_bound}; it must be negative or absent")
    taps = weights_CJ[0].shape[1]
    if not 1 <= taps <= short_conv.MAX_TAPS:
        raise ShapeError(f"weight has {taps} taps; at most {short_conv.MAX_TAPS} are served")
    num_slots, heads, key, value = state_GHKV.shape
    widths = (heads * key, heads * key, heads * value)
    for weight, width in zip(weights_CJ, widths, strict=True):
        _native_ops.require("weight", weight, torch.float32, width, taps)
    count, seqs, channels = ragged.num_rows, ragged.num_seqs, sum(widths)
    float32 = torch.float32
    _native_ops.require("x", raw_TC, float32, count, channels)
    _native_ops.require("z", z_THK, float32, count, heads, key)
    _native_ops.require("beta", beta_TH, float32, count, heads)
    _native_ops.require("A_log", a_log, float32, heads)
    _native_ops.require("dt_bias", dt_bias, float32, heads, key)
    _native_ops.require("state", state_GHKV, float32, *state_GHKV.shape)
    _native_ops.require("conv", conv_GCW, float32, num_slots, channels, taps - 1)
    _native_ops.require("slots", slots_S, torch.int64, seqs)
    inputs = (
        *(raw_TC.contiguous(), array("q", [_native_ops.address(w) for w in weights_CJ])),
        *(z_THK.contiguous(), beta_TH.contiguous(), a_log.contiguous(), dt_bias.contiguous()),
        *(lower_bound or 0.0, state_GHKV, conv_GCW, slots_S.contiguous(), ragged.borders_S1),
    )
    return inputs, (num_slots, seqs, heads, key, value, taps)
