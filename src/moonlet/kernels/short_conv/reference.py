"""Short depthwise causal convolution with SiLU and a carry (model.md section 3.3, step 2).

``y_t = silu(sum_j w[:, j] * u_{t - W + j})`` with W carried inputs before the first row.

Letters: T packed rows, S sequences, C channels, J taps, W = J - 1 carried inputs, E emitted rows,
G slots of an arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.kernels.ragged import Ragged

__all__ = ["ShortConvResult", "short_conv", "short_conv_step"]


class ShortConvResult(NamedTuple):
    """Output and new carry; ``emitted_ECW`` holds the carry after each asked-for row."""

    y_TC: Tensor
    carry_SCW: Tensor
    emitted_ECW: Tensor | None


def short_conv(
    x_TC: Tensor,
    weight_CJ: Tensor,
    carry_SCW: Tensor,
    ragged: Ragged,
    emit_at_E: Tensor | None = None,
) -> ShortConvResult:
    """Convolve every sequence, continuing from its carry.

    Args:
        x_TC: Raw projections, model dtype.
        weight_CJ: float32 taps; the last one multiplies the current row.
        carry_SCW: The last W raw inputs before the first row, oldest first; zeros at the start.
        ragged: Sequence borders.
        emit_at_E: Packed rows after which the carry is wanted too.

    Returns:
        Outputs in the dtype of ``x_TC`` (accumulation and SiLU in float32) and carries in the
        dtype of ``carry_SCW``.
    """
    width = weight_CJ.shape[1] - 1
    oldest_T = torch.arange(ragged.num_rows, device=x_TC.device) + width * ragged.seq_of_T
    # each sequence is preceded by its carry: row t of sequence s sits at t + width * (s + 1)
    heads_S = ragged.starts_S + width * torch.arange(ragged.num_seqs, device=x_TC.device)
    taps_W = torch.arange(width, device=x_TC.device)
    extended = x_TC.new_zeros((ragged.num_rows + width * ragged.num_seqs, x_TC.shape[1]))
    head_index = (heads_S[:, None] + taps_W).flatten()
    carried = carry_SCW.transpose(1, 2).flatten(0, 1).to(x_TC.dtype)
    extended = extended.index_copy(0, head_index, carried)
    extended = extended.index_copy(0, oldest_T + width, x_TC)
    y_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for j in range(width + 1):
        y_TC = y_TC + weight_CJ[:, j].float() * extended[oldest_T + j].float()
    tail_index = heads_S[:, None] + ragged.lens_S[:, None] + taps_W
    new_carry = extended[tail_index].transpose(1, 2).to(carry_SCW.dtype)
    emitted = None
    if emit_at_E is not None:
        emit_index = oldest_T[emit_at_E][:, None] + 1 + taps_W
        emitted = extended[emit_index].transpose(1, 2).to(carry_SCW.dtype)
    return ShortConvResult(F.silu(y_TC).to(x_TC.dtype), new_carry, emitted)


def short_conv_step(
    x_SC: Tensor, weights_CJ: Sequence[Tensor], state_GCW: Tensor, slots_S: Tensor
) -> Tensor:
    """Convolve one row of every sequence and move its carry on where it lies.

    Args:
        x_SC: Raw projections, model dtype.
        weights_CJ: float32 taps of equal parts of the channels, in order.
        state_GCW: Carries, oldest input first. Modified in place at ``slots_S``.
        slots_S: int64, distinct.

    Returns:
        ``[S, C]`` in the dtype of ``x_SC`` (accumulation and SiLU in float32).
    """
    weight_CJ = torch.cat(list(weights_CJ))
    inputs_SCJ = torch.cat([state_GCW[slots_S].to(x_SC.dtype), x_SC.unsqueeze(2)], dim=2)
    y_SC = torch.zeros(x_SC.shape, dtype=torch.float32, device=x_SC.device)
    for j in range(weight_CJ.shape[1]):
        y_SC = y_SC + weight_CJ[:, j].float() * inputs_SCJ[:, :, j].float()
    state_GCW[slots_S] = inputs_SCJ[:, :, 1:].to(state_GCW.dtype)
    return F.silu(y_SC).to(x_SC.dtype)
