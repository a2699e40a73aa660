"""Sizes of the vision tower and projector, read from a published ``vision_config``.

Covers what shapes and byte counts depend on (vision.md sections 2 and 11). Values that would
change the set of tensors (biases, other position tables or mergers) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonlet.core.errors import ConfigError

__all__ = ["VisionSizes", "vision_sizes"]

_IMAGE_CHANNELS = 3

# key -> the only value for which the tensor list of VisionSizes holds
_FIXED: Mapping[str, Any] = {
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """Widths and counts of MoonViT and its projector.

    Attributes:
        merged_size: Width of one merged patch, the projector's input.
        qkv_size: Width of each of q, k, v inside the fused ``wqkv``.
    """

    patch_size: int
    position_height: int
    position_width: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    qkv_size: int
    merged_size: int
    text_hidden_size: int

    def tower_shapes(self) -> dict[str, tuple[int, ...]]:
        """Published tower tensor names and shapes, all bf16."""
        width = self.hidden_size
        patch = (width, _IMAGE_CHANNELS, self.patch_size, self.patch_size)
        shapes: dict[str, tuple[int, ...]] = {
            "vision_tower.patch_embed.proj.weight": patch,
            "vision_tower.patch_embed.pos_emb.weight": (
                self.position_height,
                self.position_width,
                width,
            ),
            "vision_tower.encoder.final_layernorm.weight": (width,),
        }
        for layer in range(self.num_layers):
            block = f"vision_tower.encoder.blocks.{layer}."
            shapes[block + "norm0.weight"] = (width,)
            shapes[block + "norm1.weight"] = (width,)
            shapes[block + "wqkv.weight"] = (3 * self.qkv_size, width)
            shapes[block + "wo.weight"] = (width, self.qkv_size)
            shapes[block + "mlp.fc0.weight"] = (self.intermediate_size, width)
            shapes[block + "mlp.fc1.weight"] = (width, self.intermediate_size)
        return shapes

    def projector_shapes(self) -> dict[str, tuple[int, ...]]:
        """Published projector tensor names and shapes, all bf16."""
        return {
            "mm_projector.proj.0.weight": (self.merged_size, self.merged_size),
            "mm_projector.proj.2.weight": (self.text_hidden_size, self.merged_size),
            "mm_projector.post_norm.weight": (self.text_hidden_size,),
        }

    @property
    def tower_parameters(self) -> int:
        """Parameters of the tower."""
        width = self.hidden_size
        patch_embed = width * _IMAGE_CHANNELS * self.patch_size**2
        positions = self.position_height * self.position_width * width
        block = 2 * width + 4 * self.qkv_size * width + 2 * self.intermediate_size * width
        return patch_embed + positions + self.num_layers * block + width

    @property
    def projector_parameters(self) -> int:
        """Parameters of the projector."""
        return (
            self.merged_size**2 + self.text_hidden_size * self.merged_size + self.text_hidden_size
        )


def vision_sizes(vision: Mapping[str, Any]) -> VisionSizes:
    """Read a published ``vision_config`` object.

    Raises:
        ConfigError: A size is missing or not a positive integer, or a value stands for a tower
            with other tensors than K3's.
    """
    for name, wanted in _FIXED.items():
        seen = vision.get(name, wanted)
        if seen != wanted:
            raise ConfigError(f"vision_config.{name} is {seen!r}; only {wanted!r} is supported")
    kernel = vision.get("merge_kernel_size", [2, 2])
    if not isinstance(kernel, list | tuple) or len(kernel) != 2:
        raise ConfigError(f"vision_config.merge_kernel_size is {kernel!r}; two integers are needed")
    merge = {"merge_kernel_size[0]": kernel[0], "merge_kernel_size[1]": kernel[1]}
    return VisionSizes(
        patch_size=_size(vision, "patch_size"),
        position_height=_size(vision, "init_pos_emb_height"),
        position_width=_size(vision, "init_pos_emb_width"),
        hidden_size=_size(vision, "vt_hidden_size"),
        intermediate_size=_size(vision, "vt_intermediate_size"),
        num_layers=_size(vision, "vt_num_hidden_layers"),
        qkv_size=_size(vision, "qkv_hidden_size"),
        merged_size=_size(vision, "mm_hidden_size")
        * _size(merge, "merge_kernel_size[0]")
        * _size(merge, "merge_kernel_size[1]"),
        text_hidden_size=_size(vision, "text_hidden_size"),
    )


def _size(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"vision_config.{name} is {value!r}; a positive integer is needed")
    return value
