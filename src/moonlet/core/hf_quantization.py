"""The ``quantization_config`` object: every key honoured or refused (model.md section 2.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonlet.core.errors import ConfigError

__all__ = ["MXFP4_GROUP_SIZE", "Quantization", "parse_quantization", "published_quantization"]

MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP4_GROUP_SIZE = 32

_IGNORE = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)

# value each key must have; None marks keys whose value has no influence on decoding
_WEIGHTS: Mapping[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": MXFP4_GROUP_SIZE,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
    "actorder": None,
    "block_structure": None,
    "zp_dtype": None,
}
_FREE = ("observer", "observer_kwargs", "targets", "ignore", "quantization_status")
_FREE_GLOBAL = ("global_compression_ratio", "version", "transform_config", "sparsity_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How routed experts are packed on disk.

    Attributes:
        format: Always ``mxfp4-pack-quantized``.
        group_size: Elements per E8M0 scale along the input axis.
    """

    format: str
    group_size: int


def parse_quantization(raw: Mapping[str, Any]) -> Quantization:
    """Check a published object and return what it means.

    Whether a module is packed is decided by the tensors that exist, not by ``targets`` or
    ``ignore``: the published patterns match modules that ship as plain bf16.

    Raises:
        ConfigError: A method, format or scheme other than compressed-tensors MXFP4 weights.
    """
    _expect("quant_method", raw.get("quant_method"), "compressed-tensors")
    _expect("format", raw.get("format"), MXFP4_FORMAT)
    _expect("kv_cache_scheme", raw.get("kv_cache_scheme"), None)
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ConfigError("quantization_config.config_groups must hold exactly one group")
    known = {"quant_method", "format", "kv_cache_scheme", "config_groups", *_FREE, *_FREE_GLOBAL}
    _refuse("", raw, known)
    for name in ("transform_config", "sparsity_config"):
        if raw.get(name):
            raise ConfigError(f"quantization_config.{name} is {raw[name]!r}; it must be empty")
    ((group_name, group),) = groups.items()
    prefix = f"config_groups.{group_name}."
    _refuse(prefix, group, {"format", "weights", "input_activations", "output_activations", *_FREE})
    _expect(prefix + "format", group.get("format", MXFP4_FORMAT), MXFP4_FORMAT)
    for name in ("input_activations", "output_activations"):
        _expect(prefix + name, group.get(name), None)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f"quantization_config.{prefix}weights is missing")
    _refuse(prefix + "weights.", weights, {*_WEIGHTS, *_FREE})
    for name, value in _WEIGHTS.items():
        _expect(f"{prefix}weights.{name}", weights.get(name, value), value)
    return Quantization(format=MXFP4_FORMAT, group_size=MXFP4_GROUP_SIZE)


def published_quantization() -> dict[str, Any]:
    """Return the object that K3 ships, for writing checkpoints."""
    weights = {**_WEIGHTS, "observer": "minmax", "observer_kwargs": {}}
    group = {
        "format": MXFP4_FORMAT,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": MXFP4_FORMAT,
        "global_compression_ratio": None,
        "ignore": list(_IGNORE),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _expect(name: str, seen: Any, wanted: Any) -> None:
    if seen != wanted:
        raise ConfigError(f"quantization_config.{name} is {seen!r}; only {wanted!r} is supported")


def _refuse(prefix: str, raw: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ConfigError(
            "unknown quantization_config keys: " + ", ".join(prefix + key for key in unknown)
        )
