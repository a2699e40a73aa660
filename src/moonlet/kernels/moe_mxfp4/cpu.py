"""Routed experts from packed MXFP4 weights in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.mxfp4 import GROUP_SIZE, Packed
from moonlet.kernels.situ.gated import GatedActivation
from moonlet.kernels.spec import Spec

__all__ = ["moe_mxfp4", "refusal"]

_MODES = {"bf16": 0, "mxfp8": 1, "mxfp8-floor": 2, "int8": 3}
_BLOCK = 128
MAX_EXPERTS = 1024
# a group in integers: 32 codes, their step and their sum, in words of four bytes
_CODED_WORDS = 10


def refusal(spec: Spec) -> str | None:
    """Return why the native experts cannot serve, or None if they can."""
    reason = _native_ops.refusal(spec)
    moe = None if spec.config is None else spec.config.moe
    if reason is None and moe is not None and moe.num_experts > MAX_EXPERTS:
        return f"num_experts is {moe.num_experts}; the native kernel has at most {MAX_EXPERTS}"
    return reason


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _parts(name: str, weight: Packed, *shape: int) -> tuple[Tensor, Tensor]:
    *lead, size = shape
    _native_ops.require(f"{name}.packed", weight.packed, torch.uint8, *lead, size // 2)
    _native_ops.require(f"{name}.scale", weight.scale, torch.uint8, *lead, size // GROUP_SIZE)
    return weight.packed, weight.scale


def moe_mxfp4(
    z_TR: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    w1_EFR: Packed,
    w3_EFR: Packed,
    w2_ERF: Packed,
    activation: GatedActivation,
    mode: str = "bf16",
) -> Tensor:
    """Arguments and result as in `reference.moe_mxfp4`; float32 activations.

    Raises:
        ShapeError: Shapes or dtypes do not belong together.
        BackendError: An expert id does not exist.
    """
    (rows, top_k), size = ids_TA.shape, z_TR.shape[-1]
    experts, width = w1_EFR.packed.shape[:2]
    if size % GROUP_SIZE or width % GROUP_SIZE:
        raise ShapeError(f"expert sizes {size} and {width} are not multiples of {GROUP_SIZE}")
    _native_ops.require("z", z_TR, torch.float32, rows, size)
    _native_ops.require("ids", ids_TA, torch.int64, rows, top_k)
    _native_ops.require("weights", weights_TA, torch.float32, rows, top_k)
    out_TR = torch.empty_like(z_TR, memory_format=torch.contiguous_format)
    inputs = z_TR.new_empty(rows * _padded(size))
    hidden = z_TR.new_empty(rows * top_k * _padded(width))
    places = ids_TA.new_empty(experts + 1 + rows * top_k)
    num_groups = rows * (size + top_k * width) // GROUP_SIZE
    codes = z_TR.new_empty(num_groups * _CODED_WORDS) if mode == "int8" else None
    _native_ops.call(
        "moe_mxfp4",
        *(z_TR.contiguous(), ids_TA.contiguous(), weights_TA.contiguous()),
        *_parts("w1", w1_EFR, experts, width, size),
        *_parts("w3", w3_EFR, experts, width, size),
        *_parts("w2", w2_ERF, experts, size, width),
        *(out_TR, inputs, hidden, places, codes, rows, top_k, experts, size, width),
        *(activation.number, activation.beta, activation.linear_beta or 0.0, _MODES[mode]),
    )
    return out_TR
