"""Activations in int8: groups of 32 elements with one float32 scale.

    value = code * step,  step = largest magnitude / 127

Products with MXFP4 weights, whose codes are small integers too, can then run in integers. A group
whose step is no normal float32 becomes zeros: the inverse of a smaller step may leave float32.

Shape letters: I elements of the last axis (a multiple of 32), G = I / 32 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.kernels.microscaling import groups, straight_through

__all__ = ["encode", "fake_quantize"]

MAX_CODE = 127.0
MIN_STEP = 2.0**-126


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and steps of int8 groups.

    Args:
        x: Floating point [..., I].

    Returns:
        Whole numbers as float32 [..., G, 32], and float32 [..., G, 1]. A group with an infinity or
        a NaN has codes of zero and the step NaN.

    Raises:
        ShapeError: The last axis is not a multiple of 32, or ``x`` holds no floats.
    """
    x_GI = groups(x)
    amax_G1 = x_GI.abs().amax(-1, keepdim=True)
    step_G1 = amax_G1 * (1.0 / MAX_CODE)
    inverse_G1 = torch.where(step_G1 >= MIN_STEP, 1.0 / step_G1, 0.0)
    codes_GI = (x_GI * inverse_G1).clamp(-MAX_CODE, MAX_CODE).round()
    is_finite_G1 = torch.isfinite(amax_G1)
    return torch.where(is_finite_G1, codes_GI, 0.0), torch.where(is_finite_G1, step_G1, torch.nan)


def fake_quantize(x: Tensor) -> Tensor:
    """Round a tensor to what int8 groups can hold; the gradient passes straight through.

    Args:
        x: Floating point [..., I]. A group with an infinity or a NaN becomes NaN.

    Returns:
        [..., I] in the dtype of ``x``.

    Raises:
        ShapeError: The last axis is not a multiple of 32, or ``x`` holds no floats.
    """
    codes_GI, step_G1 = encode(x)
    return straight_through(x, (codes_GI * step_G1).flatten(-2).to(x.dtype))
