"""Export: float32 masters to the published layout (training.md sections 11 and 16).

Experts are packed by the quantiser that training used, so the served model computes what was
trained; every other weight is rounded to the dtype the layout stores (bfloat16, or float32 for
gates, convolutions and router biases).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from moonlet.core.config import ModelConfig
from moonlet.train import qat
from moonlet.weights.writer import save_model

__all__ = ["GREEDY", "export_model"]

GREEDY: Mapping[str, Any] = {"do_sample": False, "temperature": 0.0}


def export_model(
    model: nn.Module,
    config: ModelConfig,
    directory: Path,
    tokenizer_files: Mapping[str, bytes | Path],
    generation_config: Mapping[str, Any] = GREEDY,
) -> Path:
    """Write a trained model as a checkpoint that any engine for the layout can load.

    Args:
        model: Holder of the masters; not modified.
        config: Its configuration.
        directory: Target; replaced when it exists.
        tokenizer_files: File name to content or path.
        generation_config: Sampling defaults of the served model.

    Returns:
        ``directory``.
    """
    qat.disable(qat.expert_modules(model))
    stops = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    save_model(
        model,
        directory,
        config,
        tokenizer_files,
        {**stops, **generation_config},
        overwrite=True,
    )
    return directory
