"""MXFP8: groups of 32 eight-bit floats (E4M3) that share one power of two.

    value = e4m3(code) * 2^(scale - 127)

The format in which quantisation-aware training of K3 rounds the inputs of the routed experts (Kimi
K3 report, section 4.1.4). Rules for a group's scale:

    ceil   smallest power of two at which the largest magnitude is at most 448: nothing saturates
    floor  exponent of the largest magnitude minus 8 (OCP Microscaling Formats v1.0, section 6.3);
           what then exceeds 448 saturates

Shape letters: I elements of the last axis (a multiple of 32), G = I / 32 groups.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moonlet.core.errors import BackendUnavailable, ConfigError, ShapeError
from moonlet.kernels import _native, _native_ops
from moonlet.kernels.microscaling import (
    GROUP_SIZE,
    as_scale,
    ceil_exponent,
    groups,
    inverse_scale_values,
    scale_values,
    straight_through,
)

__all__ = ["RULES", "Rule", "dequantize", "fake_quantize", "quantize"]

MAX_VALUE = 448.0

Rule = Literal["ceil", "floor"]
RULES: tuple[Rule, ...] = ("ceil", "floor")
Backend = Literal["auto", "reference", "cpu"]


def quantize(x: Tensor, rule: Rule = "ceil") -> tuple[Tensor, Tensor]:
    """Encode a tensor as MXFP8, rounding to nearest, ties to even.

    Args:
        x: Floating point [..., I]. A group with an infinity or a NaN gets the NaN scale.
        rule: How the scale of a group is chosen.

    Returns:
        codes uint8 [..., I], the bits of float8_e4m3fn, and scale uint8 [..., I/32].

    Raises:
        ShapeError: The last axis is not a multiple of 32, or `x` holds no floats.
        ConfigError: Unknown rule.
    """
    x_GI = groups(x)
    scale_G = _choose_scale(x_GI, rule)
    return _encode(x_GI, scale_G).view(torch.uint8).flatten(-2), scale_G


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode MXFP8.

    Args:
        codes: uint8 [..., I], the bits of float8_e4m3fn.
        scale: uint8 [..., I/32].
        dtype: Floating-point dtype of the result; float32 is exact.

    Returns:
        [..., I] in `dtype`. Not differentiable.

    Raises:
        ShapeError: The shapes or dtypes do not belong together.
    """
    if codes.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ShapeError(f"MXFP8 is two uint8 tensors; got {codes.dtype} and {scale.dtype}")
    if scale.dim() < 1 or codes.shape != (*scale.shape[:-1], scale.shape[-1] * GROUP_SIZE):
        raise ShapeError(
            f"codes {list(codes.shape)} and scale {list(scale.shape)} do not belong together; "
            f"a scale serves {GROUP_SIZE} codes"
        )
    e4m3_GI = codes.view(torch.float8_e4m3fn).unflatten(-1, (scale.shape[-1], GROUP_SIZE))
    return _decode(e4m3_GI, scale).flatten(-2).to(dtype)


def fake_quantize(x: Tensor, rule: Rule = "ceil", backend: Backend = "auto") -> Tensor:
    """Round a tensor to what MXFP8 can hold; the gradient passes straight through.

    Args:
        x: Floating point [..., I].
        rule: How the scale of a group is chosen.
        backend: ``cpu`` for the native kernel, ``reference`` for torch, ``auto`` for the native
            kernel where it can serve. They give the same bits.

    Returns:
        [..., I] in the dtype of `x`, equal to decoding its encoding.

    Raises:
        ShapeError: The last axis is not a multiple of 32, or `x` holds no floats.
        BackendUnavailable: ``cpu`` was asked for and cannot serve.
        ConfigError: Unknown rule.
    """
    x_GI = groups(x)
    if rule not in RULES:
        raise ConfigError(f"rounding rule is {rule!r}; choose one of {', '.join(RULES)}")
    if backend != "reference":
        reason = _native_refusal(x.device)
        if reason is None:
            rounded = torch.empty(x.shape, dtype=torch.float32)
            mode = 1 + RULES.index(rule)
            _native_ops.call("round_groups", x_GI.contiguous(), rounded, x.numel(), mode)
            return straight_through(x, rounded.to(x.dtype))
        if backend == "cpu":
            raise BackendUnavailable("mxfp8 fake_quantize cannot use 'cpu'", {"cpu": reason})
    scale_G = _choose_scale(x_GI, rule)
    rounded_GI = _decode(_encode(x_GI, scale_G), scale_G)
    return straight_through(x, rounded_GI.flatten(-2).to(x.dtype))


def _native_refusal(device: torch.device) -> str | None:
    is_built, reason = _native.availability()
    if not is_built:
        return reason
    return None if device.type == "cpu" else f"the native kernel runs on the CPU, not on {device}"


def _choose_scale(x_GI: Tensor, rule: Rule) -> Tensor:
    """The scale byte of each group, from the bits of its largest magnitude."""
    amax_G = x_GI.abs().amax(-1)
    if rule == "ceil":
        biased_G = ceil_exponent(amax_G / MAX_VALUE)
    elif rule == "floor":
        biased_G = (amax_G.view(torch.int32) >> 23) - 8
    else:
        raise ConfigError(f"rounding rule is {rule!r}; choose one of {', '.join(RULES)}")
    return as_scale(biased_G, amax_G)


def _encode(x_GI: Tensor, scale_G: Tensor) -> Tensor:
    """Divide by the scale, saturate and round to float8_e4m3fn [..., G, 32]."""
    y_GI = x_GI * inverse_scale_values(x_GI.device)[scale_G.int()].unsqueeze(-1)
    return y_GI.nan_to_num(0.0).clamp(-MAX_VALUE, MAX_VALUE).to(torch.float8_e4m3fn)


def _decode(e4m3_GI: Tensor, scale_G: Tensor) -> Tensor:
    return e4m3_GI.float() * scale_values(e4m3_GI.device)[scale_G.int()].unsqueeze(-1)
