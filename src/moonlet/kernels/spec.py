"""What a model needs of its operators: the question that every backend answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moonlet.core.config import ModelConfig

__all__ = ["Spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The case that a backend must serve.

    Attributes:
        device: Where the model runs.
        config: The architecture, or None when any is meant.
        dtype: Dtype of activations.
        is_inference: Whether gradients are never wanted.
    """

    device: torch.device
    config: ModelConfig | None = None
    dtype: torch.dtype = torch.float32
    is_inference: bool = False
