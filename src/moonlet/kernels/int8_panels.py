"""Int8 weights in panels, for products with activations in int8 groups.

    y_o = scale_o * sum over groups g of step_g * (sum over the group of x_code * weight_code)

The inner sums are exact integers (`int8_groups` makes the codes of the activations). Panels hold
sixteen outputs with four inputs of each side by side, as bytes 128 above the code: the order in
which one instruction of AVX512-VNNI reads them, for one row as for many.

Shape letters: O outputs, I inputs, P = O / 16 panels, Q = I / 4 inputs at a time; both rounded up,
Q to whole groups of 32 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.kernels import int8_groups
from moonlet.kernels.microscaling import GROUP_SIZE

__all__ = ["is_panels", "multiply", "pack", "unpack"]

OUTPUTS, INPUTS = 16, 4
_OFFSET = 128


def is_panels(weight: Tensor) -> bool:
    """Whether a weight is stored in panels; every other form is a matrix."""
    return weight.dim() == 4


def pack(codes_OI: Tensor) -> Tensor:
    """Return int8 codes as panels, uint8 ``[P, Q, 16, 4]``; what is rounded up holds zeros."""
    size_out, size_in = codes_OI.shape
    padded = F.pad(codes_OI, (0, -size_in % GROUP_SIZE, 0, -size_out % OUTPUTS))
    panels_POQI = padded.unflatten(1, (-1, INPUTS)).unflatten(0, (-1, OUTPUTS))
    # the offset turns the sign bit alone
    return (panels_POQI.transpose(1, 2).contiguous().view(torch.uint8)) ^ _OFFSET


def unpack(panels_PQOI: Tensor, size_out: int) -> Tensor:
    """Return the int8 codes ``[O, inputs in whole groups]`` of panels."""
    codes_PQOI = (panels_PQOI ^ _OFFSET).view(torch.int8)
    return codes_PQOI.transpose(1, 2).flatten(2).flatten(0, 1)[:size_out]


def multiply(x: Tensor, panels_PQOI: Tensor, scale_O: Tensor) -> Tensor:
    """Multiply rows, rounded to int8 groups, by a matrix in panels.

    Args:
        x: Floating point ``[..., I]``.
        panels_PQOI: uint8, from `pack`.
        scale_O: float32, the value of one step of every output.

    Returns:
        ``[..., O]`` in the dtype of ``x``.
    """
    weight_OGI = unpack(panels_PQOI, scale_O.shape[0]).unflatten(1, (-1, GROUP_SIZE))
    x = F.pad(x, (0, weight_OGI.shape[1] * GROUP_SIZE - x.shape[-1]))
    codes, step = int8_groups.encode(x)
    y = x.new_zeros(*x.shape[:-1], scale_O.shape[0])
    for g in range(weight_OGI.shape[1]):
        # below 2^24: exact in float32
        products = F.linear(codes[..., g, :], weight_OGI[:, g].float())
        y = y + (products * step[..., g, :]).to(x.dtype)
    return y * scale_O.to(x.dtype)
