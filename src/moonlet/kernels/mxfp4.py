"""MXFP4: groups of 32 four-bit floats that share one power of two.

    value = sign * magnitude * 2^(scale - 127)
    magnitude in {0, 0.5, 1, 1.5, 2, 3, 4, 6} (E2M1), scale an E8M0 byte, 255 meaning NaN

OCP Microscaling Formats v1.0, sections 5.2 and 5.3, in the layout of the published K3 checkpoint:
along the last axis, element 2j sits in the low nibble of byte j and element 2j + 1 in the high
one. A value has at most two significant bits, so bfloat16 holds it exactly (float32 too; values
past its range are infinite).

Rules for choosing a group's scale from its largest magnitude (names as in torchao):

    even   round the largest magnitude to two significant bits, then take its exponent (the rule of
           the published checkpoints)
    floor  its exponent
    ceil   its exponent, rounded up
    rceil  exponent of max / 6, rounded up: nothing saturates, and the range is used best

Shape letters: I elements of the last axis (a multiple of 32), G = I / 32 groups.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moonlet.core.errors import BackendUnavailable, ConfigError, ShapeError
from moonlet.kernels import _native
from moonlet.kernels.microscaling import (
    GROUP_SIZE,
    as_scale,
    ceil_exponent,
    groups,
    inverse_scale_values,
    scale_values,
    straight_through,
)

__all__ = [
    "RULES",
    "Backend",
    "Packed",
    "Rule",
    "dequantize",
    "fake_quantize",
    "native_refusal",
    "pack",
    "quantize",
    "unpack",
]

Rule = Literal["even", "floor", "ceil", "rceil"]
RULES: tuple[Rule, ...] = ("even", "floor", "ceil", "rceil")
Backend = Literal["auto", "reference", "cpu"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAX_EXPONENT = 2  # of the largest magnitude, 6 = 1.5 * 2^2


def pack(codes: Tensor) -> Tensor:
    """Put two four-bit codes into each byte.

    Args:
        codes: uint8 [..., I], each below 16; I even.

    Returns:
        uint8 [..., I/2], element 2j in the low nibble of byte j.
    """
    if codes.shape[-1] % 2:
        raise ShapeError(f"last axis has {codes.shape[-1]} codes; an even number fills bytes")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Split each byte into its two four-bit codes.

    Args:
        packed: uint8 [..., I/2].

    Returns:
        uint8 [..., I].
    """
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def quantize(w: Tensor, rule: Rule = "even") -> tuple[Tensor, Tensor]:
    """Encode a tensor as MXFP4.

    Elements are rounded to the nearest code, ties to the even one, and saturate at 6 times the
    scale. A negative element that rounds to zero keeps its sign. A group of zeros gets scale 0; a
    group with an infinity or a NaN gets the NaN scale. Encoding what `dequantize` gave is exact in
    value.

    Args:
        w: Floating point [..., I].
        rule: How the scale of a group is chosen.

    Returns:
        packed uint8 [..., I/2] and scale uint8 [..., I/32].

    Raises:
        ShapeError: The last axis is not a multiple of 32.
        ConfigError: Unknown rule.
    """
    x_GI = groups(w)
    scale_G = _choose_scale(x_GI, rule)
    rounded_GI = _round(x_GI, scale_G)
    # twice a magnitude is a whole number below 13
    codes_GI = _code_of_doubled(w.device)[(rounded_GI.abs() * 2).to(torch.int64)]
    codes_GI |= torch.signbit(rounded_GI).to(torch.uint8) << 3
    return pack(codes_GI.flatten(-2)), scale_G


def dequantize(
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.float32,
    backend: Backend = "auto",
) -> Tensor:
    """Decode MXFP4.

    Args:
        packed: uint8 [..., I/2].
        scale: uint8 [..., I/32].
        dtype: Floating-point dtype of the result; float32 and bfloat16 are exact.
        backend: ``cpu`` for the native kernel, ``reference`` for torch, ``auto`` for the native
            kernel where it can serve.

    Returns:
        [..., I] in `dtype`. Not differentiable.

    Raises:
        ShapeError: The shapes or dtypes do not belong together.
        BackendUnavailable: ``cpu`` was asked for and cannot serve.
        ConfigError: Unknown backend.
    """
    _check_pair(packed, scale)
    if backend not in ("auto", "reference", "cpu"):
        raise ConfigError(f"backend is {backend!r}; choose one of auto, reference, cpu")
    if backend != "reference":
        reason = native_refusal(packed.device, dtype)
        if reason is None:
            out = torch.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=dtype)
            return _native.mxfp4_dequantize(packed.contiguous(), scale.contiguous(), out)
        if backend == "cpu":
            raise BackendUnavailable("mxfp4 dequantize cannot use 'cpu'", {"cpu": reason})
    return _dequantize_reference(packed, scale, dtype)


class Packed(NamedTuple):
    """MXFP4 matrices: uint8 ``packed [..., I/2]`` and ``scale [..., I/32]``."""

    packed: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Decode to ``[..., I]``; see `dequantize`."""
        return dequantize(self.packed, self.scale, dtype)

    def of(self, index: Tensor) -> Packed:
        """Select along the first axis."""
        return Packed(self.packed[index], self.scale[index])


def native_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the native kernel cannot decode on `device` to `dtype`, or None if it can."""
    is_built, reason = _native.availability()
    if not is_built:
        return reason
    if device.type != "cpu":
        return f"the native kernel runs on the CPU, not on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the native kernel writes float32 and bfloat16, not {dtype}"
    return None


def fake_quantize(w: Tensor, rule: Rule = "even") -> Tensor:
    """Round a tensor to what MXFP4 can hold; the gradient passes straight through.

    Args:
        w: Floating point [..., I].
        rule: How the scale of a group is chosen.

    Returns:
        [..., I] in the dtype of `w`, equal to decoding its encoding.
    """
    x_GI = groups(w)
    scale_G = _choose_scale(x_GI, rule)
    value_GI = _round(x_GI, scale_G) * scale_values(w.device)[scale_G.int()].unsqueeze(-1)
    return straight_through(w, value_GI.flatten(-2).to(w.dtype))


def _dequantize_reference(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    values = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))
    values_16 = torch.tensor(values, dtype=torch.float32, device=packed.device)
    x_GI = values_16[unpack(packed).int()].unflatten(-1, (-1, GROUP_SIZE))
    x_GI *= scale_values(packed.device)[scale.int()].unsqueeze(-1)
    return x_GI.flatten(-2).to(dtype)


def _choose_scale(x_GI: Tensor, rule: Rule) -> Tensor:
    """The scale byte of each group, from the bits of its largest magnitude."""
    amax_G = x_GI.abs().amax(-1)
    bits_G = amax_G.view(torch.int32)
    if rule == "even":
        # half of the last of two significant bits, so that 1.75 and above go to the next binade
        biased_G = (bits_G + (1 << 21) >> 23) - _MAX_EXPONENT
    elif rule == "floor":
        biased_G = (bits_G >> 23) - _MAX_EXPONENT
    elif rule == "ceil":
        biased_G = ceil_exponent(amax_G) - _MAX_EXPONENT
    elif rule == "rceil":
        biased_G = ceil_exponent(amax_G / _MAGNITUDES[-1])
    else:
        raise ConfigError(f"rounding rule is {rule!r}; choose one of {', '.join(RULES)}")
    return as_scale(biased_G, amax_G)


def _round(x_GI: Tensor, scale_G: Tensor) -> Tensor:
    """Divide by the scale and round to signed magnitudes, ties to the even code."""
    inverse_G = inverse_scale_values(x_GI.device)[scale_G.int()]
    # a NaN here is infinity times the zero at the NaN scale
    y_GI = (x_GI * inverse_G.unsqueeze(-1)).nan_to_num_(0.0)
    magnitude_GI = y_GI.abs()
    # spacing of the codes: 0.5 up to 2, 1 up to 4, 2 above, that is half the power of two below
    power_GI = (magnitude_GI.view(torch.int32) & 0x7F800000).view(torch.float32)
    step_GI = power_GI.clamp_(1.0, 4.0).mul_(0.5)
    # round() takes ties to even
    rounded_GI = magnitude_GI.div_(step_GI).round_().mul_(step_GI)
    return rounded_GI.clamp_(max=_MAGNITUDES[-1]).copysign_(y_GI)


def _check_pair(packed: Tensor, scale: Tensor) -> None:
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ShapeError(f"MXFP4 is two uint8 tensors; got {packed.dtype} and {scale.dtype}")
    if packed.dim() < 1 or packed.shape[-1] != scale.shape[-1] * (GROUP_SIZE // 2):
        raise ShapeError(
            f"packed {list(packed.shape)} and scale {list(scale.shape)} do not belong together; "
            "a scale serves 16 packed bytes"
        )
    if packed.shape[:-1] != scale.shape[:-1]:
        raise ShapeError(f"leading axes differ: {list(packed.shape)} and {list(scale.shape)}")
    if packed.device != scale.device:
        raise ShapeError(f"packed is on {packed.device}, scale on {scale.device}; move one")


@cache
def _code_of_doubled(device: torch.device) -> Tensor:
    """Code of each doubled magnitude, uint8 [13]."""
    codes = [0] * 13
    for code, magnitude in enumerate(_MAGNITUDES):
        codes[int(magnitude * 2)] = code
    return torch.tensor(codes, dtype=torch.uint8, device=device)
