"""Quantisation-aware training of the routed experts (training.md section 11).

Forward passes use ``dequantise(quantise(w))`` of MXFP4 weights and, where wanted, MXFP8
activations; gradients pass straight through to the float32 masters. The quantiser is the one
that writes checkpoints, so an exported model computes exactly what was trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from moonlet.core.errors import ConfigError
from moonlet.kernels import mxfp4, mxfp8

__all__ = ["ACTIVATION_FORMATS", "disable", "enable", "expert_modules"]

ACTIVATION_FORMATS = ("none", "mxfp8")


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the routed-expert modules of a model, in layer order."""
    return [m for m in model.modules() if hasattr(m, "weight_transform")]


def enable(experts: Iterable[Any], activations: str = "none") -> None:
    """Switch fake quantisation on.

    Args:
        experts: Modules from `expert_modules`.
        activations: ``none`` (how the released checkpoint is served) or ``mxfp8``.

    Raises:
        ConfigError: ``activations`` is not a known format.
    """
    if activations not in ACTIVATION_FORMATS:
        raise ConfigError(
            f"quantization.activations is {activations!r}; "
            f"choose one of {', '.join(ACTIVATION_FORMATS)}"
        )
    for module in experts:
        module.weight_transform = mxfp4.fake_quantize
        module.activation_transform = mxfp8.fake_quantize if activations == "mxfp8" else None


def disable(experts: Iterable[Any]) -> None:
    """Switch fake quantisation off."""
    for module in experts:
        module.weight_transform = None
        module.activation_transform = None
