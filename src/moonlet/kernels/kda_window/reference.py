"""Verification windows of KDA as plain decode steps (speculative.md sections 6.1 and 6.3).

A window is run twice from its projected inputs. `kda_window` gives the outputs of all rows and
leaves the stored state as it was; when it is known how many rows stay, `kda_replay` runs those
again, and this time the state moves. Every row is one `short_conv_step` and one `kda_step`, so the
second run ends where plain decode of the same rows ends.

Letters: T packed rows, S sequences, C = H (2 K + V) convolution channels (q, k, v), J taps,
W = J - 1 carried inputs, H heads, K key width, V value width, G slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels.kda.reference import kda_step
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.short_conv.reference import short_conv_step

__all__ = ["kda_replay", "kda_window"]


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
    """Return the outputs of every row of every window; no memory is modified.

    Args:
        raw_TC: Raw projections of q, k and v side by side, before the convolution.
        weights_CJ: float32 taps of q, k and v.
        z_THK: Raw gate projection.
        beta_logits_TH: Raw write strength.
        A_log_H: float32 log scale per head.
        dt_bias_HK: float32 gate bias.
        lower_bound: Gate bound, or None for the softplus gate.
        state_GHKV: float32 states by slot.
        conv_GCW: Carries by slot, oldest input first.
        slots_S: int64, distinct: where each sequence's memory lies.
        ragged: Borders of the windows.

    Returns:
        Output ``[T, H, V]`` in the dtype of ``raw_TC``.
    """
    inputs = (raw_TC, z_THK, beta_logits_TH)
    gates = (A_log_H, dt_bias_HK, lower_bound)
    copies = (state_GHKV.index_select(0, slots_S), conv_GCW.index_select(0, slots_S))
    slots = torch.arange(ragged.num_seqs, device=slots_S.device)
    return _run(inputs, weights_CJ, gates, copies, slots, ragged, ragged.lens_S)


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
    """Move the memory on over the first rows of every window.

    Args:
        raw_TC: This and all others as in `kda_window`, but the memory is modified in place.
        weights_CJ: Taps.
        z_THK: Gate projection.
        beta_logits_TH: Write strength.
        A_log_H: Log scale.
        dt_bias_HK: Gate bias.
        lower_bound: Gate bound.
        state_GHKV: Slots ``slots_S`` are modified in place, no other slot is read.
        conv_GCW: Likewise.
        slots_S: Slots.
        ragged: Borders of the windows.
        counts_S: int64: rows to keep of each window, 0 up to all. A slot that keeps none is not
            touched.

    Raises:
        ShapeError: A count exceeds its window; nothing was changed.
    """
    _check_counts(counts_S, ragged)
    inputs = (raw_TC, z_THK, beta_logits_TH)
    gates = (A_log_H, dt_bias_HK, lower_bound)
    _run(inputs, weights_CJ, gates, (state_GHKV, conv_GCW), slots_S, ragged, counts_S)


def _check_counts(counts_S: Tensor, ragged: Ragged) -> None:
    """Check that no window keeps more rows than it has.

    Raises:
        ShapeError: One does, or a count is negative.
    """
    if counts_S.shape != (ragged.num_seqs,):
        raise ShapeError(f"{list(counts_S.shape)} counts for {ragged.num_seqs} windows")
    if bool(((counts_S < 0) | (counts_S > ragged.lens_S)).any()):
        lens = list(ragged.seq_lens)
        raise ShapeError(f"counts are {counts_S.tolist()} for windows of {lens} rows")


def _run(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights_CJ: Sequence[Tensor],
    gates: tuple[Tensor, Tensor, float | None],
    memory: tuple[Tensor, Tensor],
    slots_S: Tensor,
    ragged: Ragged,
    counts_S: Tensor,
) -> Tensor:
    """Step through the first rows of every sequence; rows beyond have no output."""
    raw_TC, z_THK, beta_TH = inputs
    state_GHKV, conv_GCW = memory
    heads, key_size, value_size = state_GHKV.shape[1:]
    widths = [heads * key_size, heads * key_size, heads * value_size]
    o_THV = raw_TC.new_zeros((ragged.num_rows, heads, value_size))
    for t in range(int(counts_S.max())):
        live = (counts_S > t).nonzero()[:, 0]
        rows, slots = ragged.starts_S[live] + t, slots_S[live]
        y_SC = short_conv_step(raw_TC[rows], weights_CJ, conv_GCW, slots)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in y_SC.split(widths, dim=-1))
        o_THV[rows] = kda_step(q, k, v, z_THK[rows], beta_TH[rows], *gates, state_GHKV, slots)
    return o_THV
