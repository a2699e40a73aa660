"""The name map between published tensors and the model's parameters, in both directions.

A published tensor fills one `Slot`: a parameter of `moonlet.model.transformer.Transformer`, or one
expert's part of a stacked parameter. Names are mapped by form alone; whether a slot exists in a
given architecture, and with which shape, is known to `moonlet.weights.shapes`.

Text tensors may carry the prefix ``language_model.`` (K3) or not (Kimi-Linear). Vision and
projector tensors keep their published names as slots.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "PACKED",
    "PLAIN",
    "SCALE",
    "TEXT_PREFIX",
    "Slot",
    "is_vision",
    "to_name",
    "to_slot",
]

TEXT_PREFIX = "language_model."

PLAIN, PACKED, SCALE = "plain", "packed", "scale"


class Slot(NamedTuple):
    """Where a published tensor goes.

    Attributes:
        parameter: Parameter path in the model, or the published name of a vision tensor.
        expert: Index into the first axis of a stacked expert parameter, or None.
        part: ``plain``, or ``packed`` / ``scale`` of an MXFP4 pair.
    """

    parameter: str
    expert: int | None = None
    part: str = PLAIN


_TOP = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "model.norm.weight": "norm.weight",
    "model.output_attn_res_norm.weight": "output_attn_res_norm.weight",
    "model.output_attn_res_proj.weight": "output_attn_res_proj.weight",
    "lm_head.weight": "lm_head.weight",
}
_TOP_REVERSE = {slot: name for name, slot in _TOP.items()}

# names inside a layer that are the same on both sides
_SAME_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attention_res_norm",
    "self_attention_res_proj",
    "mlp_res_norm",
    "mlp_res_proj",
)
_SAME_ATTENTION = (
    *(f"{letter}_{kind}" for letter in "qkv" for kind in ("proj", "conv1d")),
    "f_a_proj",
    "f_b_proj",
    "b_proj",
    "g_proj",
    "g_a_proj",
    "g_b_proj",
    "o_norm",
    "o_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
)
_MLP = ("gate_proj", "up_proj", "down_proj")
_MOE = (
    "gate.weight",
    "gate.e_score_correction_bias",
    "routed_expert_down_proj.weight",
    "routed_expert_norm.weight",
    "routed_expert_up_proj.weight",
    *(f"shared_experts.{name}.weight" for name in _MLP),
)

# published suffix inside a layer -> suffix in the model
_LAYER: dict[str, str] = {
    **{f"{name}.weight": f"{name}.weight" for name in _SAME_NORMS},
    **{f"self_attn.{name}.weight": f"self_attn.{name}.weight" for name in _SAME_ATTENTION},
    "self_attn.A_log": "self_attn.A_log",
    "self_attn.dt_bias": "self_attn.dt_bias",
    **{f"mlp.{name}.weight": f"ffn.{name}.weight" for name in _MLP},
    **{f"block_sparse_moe.{name}": f"ffn.{name}" for name in _MOE},
}
_LAYER_REVERSE = {slot: name for name, slot in _LAYER.items()}

_PART_OF_SUFFIX = {"weight": PLAIN, "weight_packed": PACKED, "weight_scale": SCALE}
_SUFFIX_OF_PART = {part: suffix for suffix, part in _PART_OF_SUFFIX.items()}

# one spelling per number, so that the map stays one to one
_NUMBER = r"(0|[1-9][0-9]*)"
_LAYER_NAME = re.compile(rf"model\.layers\.{_NUMBER}\.(.+)")
_EXPERT_NAME = re.compile(
    rf"block_sparse_moe\.experts\.{_NUMBER}\.(w[123])\.(weight|weight_packed|weight_scale)"
)
# a linear map of a layer, published as an MXFP4 pair
_PAIR_NAME = re.compile(r"(.+_proj)\.(weight_packed|weight_scale)")
_LAYER_SLOT = re.compile(rf"layers\.{_NUMBER}\.(.+)")
_EXPERT_SLOT = re.compile(r"ffn\.experts\.(w[123])")

_VISION_BLOCK = ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
_VISION_NAME = re.compile(
    r"vision_tower\.patch_embed\.(proj|pos_emb)\.weight"
    r"|vision_tower\.encoder\.final_layernorm\.weight"
    rf"|vision_tower\.encoder\.blocks\.{_NUMBER}"
    rf"\.({'|'.join(map(re.escape, _VISION_BLOCK))})\.weight"
    r"|mm_projector\.(proj\.0|proj\.2|post_norm)\.weight"
)


def is_vision(slot: Slot) -> bool:
    """Whether the slot belongs to the vision tower or the projector."""
    return slot.parameter.startswith(("vision_tower.", "mm_projector."))


def to_slot(name: str) -> Slot | None:
    """Map a published tensor name to its slot; None for a name of no known form."""
    text = name.removeprefix(TEXT_PREFIX)
    matched = _LAYER_NAME.fullmatch(text)
    if matched is None:
        if text in _TOP:
            return Slot(_TOP[text])
        return Slot(name) if _VISION_NAME.fullmatch(name) else None
    layer, suffix = matched.groups()
    expert = _EXPERT_NAME.fullmatch(suffix)
    if expert is not None:
        index, matrix, ending = expert.groups()
        return Slot(f"layers.{layer}.ffn.experts.{matrix}", int(index), _PART_OF_SUFFIX[ending])
    part, pair = PLAIN, _PAIR_NAME.fullmatch(suffix)
    if pair is not None:
        suffix, part = f"{pair.group(1)}.weight", _PART_OF_SUFFIX[pair.group(2)]
    return Slot(f"layers.{layer}.{_LAYER[suffix]}", part=part) if suffix in _LAYER else None


def to_name(slot: Slot, prefix: str = TEXT_PREFIX) -> str:
    """Map a slot to its published name: the inverse of `to_slot`.

    Args:
        slot: A slot that `to_slot` could return.
        prefix: ``language_model.`` or empty; vision tensors never carry it.

    Raises:
        KeyError: The slot is no parameter of the architecture.
    """
    if is_vision(slot):
        return slot.parameter
    if slot.parameter in _TOP_REVERSE:
        return prefix + _TOP_REVERSE[slot.parameter]
    matched = _LAYER_SLOT.fullmatch(slot.parameter)
    if matched is None:
        raise KeyError(f"{slot.parameter} is no parameter of the text model")
    layer, suffix = matched.groups()
    expert = _EXPERT_SLOT.fullmatch(suffix)
    if expert is not None and slot.expert is not None:
        ending = f"{slot.expert}.{expert.group(1)}.{_SUFFIX_OF_PART[slot.part]}"
        return f"{prefix}model.layers.{layer}.block_sparse_moe.experts.{ending}"
    ending = _LAYER_REVERSE[suffix]
    if slot.part != PLAIN:
        ending = ending.removesuffix("weight") + _SUFFIX_OF_PART[slot.part]
    return f"{prefix}model.layers.{layer}.{ending}"
