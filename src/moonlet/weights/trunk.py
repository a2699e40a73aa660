"""An int8 trunk: matrices outside the routed experts with one float32 scale per output row.

    weight ~ code * scale,  scale = largest magnitude of the row / 127

Half the bytes of bfloat16 per token, at an error that `quantize_trunk` reports. The published file
stays as it is; this is a choice made when a model is loaded. A second choice rounds the inputs of
these maps too, to int8 groups of 32: weights then lie in panels (`kernels.int8_panels`), and
products are sums of integers.

Letters: I input width, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moonlet.kernels import int8_panels
from moonlet.model.layers import Linear

__all__ = ["TrunkReport", "is_read_by_linear", "quantize_rows", "quantize_trunk"]

MAX_CODE = 127
# read as matrices by other operators than `linear`, or a single row
_KEPT = ("kv_b_proj", "_res_proj")


@dataclass(frozen=True, slots=True)
class TrunkReport:
    """What became of the trunk.

    Attributes:
        num_matrices: Matrices in int8.
        bytes_before: Their bytes as stored.
        bytes_after: Their bytes now, scales included.
        relative_error: Root of the summed squared errors over that of the summed squared weights.
    """

    num_matrices: int
    bytes_before: int
    bytes_after: int
    relative_error: float


def is_read_by_linear(name: str) -> bool:
    """Whether the operator `linear` alone reads the linear map of this name."""
    return not name.endswith(_KEPT)


def quantize_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and float32 scales; a row of zeros has the scale 0."""
    wide_OI = weight_OI.float()
    scale_O = wide_OI.abs().amax(1) / MAX_CODE
    inverse_O = torch.where(scale_O > 0, 1.0 / scale_O, 0.0)
    codes_OI = (wide_OI * inverse_O[:, None]).round().clamp(-MAX_CODE, MAX_CODE)
    return codes_OI.to(torch.int8), scale_O


@torch.no_grad()
def quantize_trunk(model: nn.Module, activation: str = "bf16") -> TrunkReport:
    """Replace every linear map's matrix by int8, one matrix at a time; packed ones stay packed.

    Args:
        model: Modified in place; not trainable afterwards.
        activation: ``int8`` rounds the inputs of these maps to int8 groups, ``bf16`` does not.
    """
    count = before = after = 0
    error = total = 0.0
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or not is_read_by_linear(name):
            continue
        if module.weight.dtype == torch.uint8:
            continue
        weight_OI = module.weight
        codes_OI, scale_O = quantize_rows(weight_OI)
        restored_OI = codes_OI.float() * scale_O[:, None]
        error += float((restored_OI - weight_OI.float()).square().sum(dtype=torch.float64))
        total += float(weight_OI.float().square().sum(dtype=torch.float64))
        before += weight_OI.numel() * weight_OI.element_size()
        stored = int8_panels.pack(codes_OI) if activation == "int8" else codes_OI
        after += stored.numel() + scale_O.numel() * scale_O.element_size()
        module.weight = nn.Parameter(stored, requires_grad=False)
        module.scale = scale_O
        count += 1
    return TrunkReport(count, before, after, (error / total) ** 0.5 if total else 0.0)
