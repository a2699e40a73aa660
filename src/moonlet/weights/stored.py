"""A model for inference whose matrices keep the bytes in which they were published.

bfloat16 matrices stay bfloat16 and packed ones stay packed; the native kernels widen them while
they read. Vectors (norms, biases, gates) are float32, as are activations.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from moonlet.core.config import ModelConfig
from moonlet.kernels.registry import Kernels
from moonlet.model.latent_moe import Experts
from moonlet.model.layers import Linear
from moonlet.model.transformer import Transformer
from moonlet.weights.extents import TensorExtent
from moonlet.weights.names import PACKED, to_slot
from moonlet.weights.trunk import is_read_by_linear

__all__ = ["build_as_stored", "reads_as_stored"]

# matrices that an operator reads in bfloat16; everything else is widened when it is loaded
_MATRICES = ("_proj.weight", "embed_tokens.weight", "lm_head.weight", "gate.weight")
_EXPERT_MATRICES = (".w1", ".w2", ".w3")


def reads_as_stored(kernels: Kernels) -> bool:
    """Return whether the kernels serve weights in their stored dtypes without widening a copy."""
    return kernels.backend("linear") == "cpu"


def build_as_stored(
    config: ModelConfig, kernels: Kernels, extents: Mapping[str, TensorExtent]
) -> Transformer:
    """Build an unfilled model with the dtypes of a checkpoint.

    Args:
        config: Architecture.
        kernels: Operators of which `reads_as_stored` is true.
        extents: Tensors of the checkpoint.

    Returns:
        A model in evaluation mode without gradients; `loader.load_into` fills it.
    """
    model = Transformer(
        config, kernels, dtype=torch.float32, device="meta", attn_res_form="two_phase"
    )
    slots = {name: slot for name in extents if (slot := to_slot(name)) is not None}
    packed = {slot.parameter for slot in slots.values() if slot.part == PACKED}
    for name, module in model.named_modules():
        if isinstance(module, Experts) and f"{name}.w1" in packed:
            module.pack()
        # what attention reads as a matrix is decoded when it is loaded
        if isinstance(module, Linear) and f"{name}.weight" in packed and is_read_by_linear(name):
            module.pack()
    dtypes = {
        slot.parameter: torch.bfloat16
        for name, slot in slots.items()
        if extents[name].dtype == "BF16" and _stays(slot.parameter, kernels)
    }
    for prefix, module in model.named_modules():
        _materialise(module, f"{prefix}." if prefix else "", dtypes)
    return model.eval()


def _stays(parameter: str, kernels: Kernels) -> bool:
    if parameter.endswith(_EXPERT_MATRICES):
        return kernels.backend("moe_experts") == "cpu"
    return parameter.endswith(_MATRICES) and "_res_proj" not in parameter


def _materialise(module: nn.Module, prefix: str, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give the module's own tensors memory, in their stored dtype where one is named."""
    for name, tensor in list(module.named_parameters(recurse=False)):
        dtype = dtypes.get(prefix + name, tensor.dtype)
        empty = torch.empty(tensor.shape, dtype=dtype)
        setattr(module, name, nn.Parameter(empty, requires_grad=False))
    for name, tensor in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty(tensor.shape, dtype=tensor.dtype))
