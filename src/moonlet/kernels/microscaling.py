"""What the MX formats share: groups of 32 elements with one E8M0 scale byte.

A scale byte `s` stands for 2^(s - 127); 255 is NaN (OCP Microscaling Formats v1.0, section 5.4.1).
Powers of two come from tables made of bit patterns, so that 2^-127, a float32 subnormal, is right
whatever the floating-point mode of the thread that makes them first. `mxfp4.py` and `mxfp8.py` add
their element formats.

Shape letters: I elements of the last axis (a multiple of 32), G = I / 32 groups.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError

__all__ = [
    "GROUP_SIZE",
    "NAN_SCALE",
    "as_scale",
    "ceil_exponent",
    "groups",
    "inverse_scale_values",
    "scale_values",
    "straight_through",
]

GROUP_SIZE = 32
NAN_SCALE = 255

_NAN_BITS = 0x7FC00000
_SUBNORMAL_BITS = 0x00400000  # of 2^-127


def groups(x: Tensor) -> Tensor:
    """View [..., I] as detached float32 [..., G, 32].

    Raises:
        ShapeError: The last axis is not a multiple of 32, or the tensor holds no floats.
    """
    if x.dim() < 1 or x.shape[-1] % GROUP_SIZE:
        raise ShapeError(
            f"MX formats need a last axis that is a multiple of {GROUP_SIZE}; got {list(x.shape)}"
        )
    if not x.is_floating_point():
        raise ShapeError(f"MX formats encode floating-point tensors; got {x.dtype}")
    return x.detach().float().unflatten(-1, (x.shape[-1] // GROUP_SIZE, GROUP_SIZE))


def ceil_exponent(x: Tensor) -> Tensor:
    """Biased exponent of the smallest power of two that is at least `x`.

    Args:
        x: float32, not negative.

    Returns:
        int32, ceil(log2(x)) + 127, and 0 for everything up to 2^-127.
    """
    bits = x.view(torch.int32)
    return torch.where(bits <= _SUBNORMAL_BITS, 0, (bits + 0x7FFFFF) >> 23)


def as_scale(biased_G: Tensor, amax_G: Tensor) -> Tensor:
    """Clamp biased exponents to scale bytes; a group that is not finite gets the NaN scale.

    Args:
        biased_G: int32, exponent plus 127.
        amax_G: float32, largest magnitude of each group.

    Returns:
        uint8, shaped like the arguments.
    """
    scale_G = biased_G.clamp(0, NAN_SCALE - 1)
    return torch.where(torch.isfinite(amax_G), scale_G, NAN_SCALE).to(torch.uint8)


@cache
def scale_values(device: torch.device) -> Tensor:
    """2^(s - 127) for each scale byte s, float32 [256]."""
    bits = [_power_bits(s - 127) for s in range(255)] + [_NAN_BITS]
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)


@cache
def inverse_scale_values(device: torch.device) -> Tensor:
    """2^(127 - s) for each scale byte s, float32 [256]; 0 at the NaN scale, where codes are 0."""
    bits = [_power_bits(127 - s) for s in range(255)] + [0]
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)


def _power_bits(exponent: int) -> int:
    """float32 pattern of 2^exponent for an exponent in [-127, 127]."""
    return (exponent + 127) << 23 if exponent > -127 else _SUBNORMAL_BITS


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the gradient of the result handed to `x` unchanged."""
    return _StraightThrough.apply(x, rounded)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None
