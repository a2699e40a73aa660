"""Reading and writing the published ``config.json`` (model.md section 1).

Three spellings are read: the K3 wrapper (``text_config`` inside), a bare text config
(Kimi-Linear), and the field names that transformers gives Kimi-Linear. A key that is neither used
nor listed as irrelevant is an error, because it could change the forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from moonlet.core.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moonlet.core.errors import ConfigError
from moonlet.core.hf_fields import IRRELEVANT, RENAMED, TEXT_KEYS, WRAPPER_KEYS
from moonlet.core.hf_quantization import Quantization, parse_quantization

__all__ = ["CheckpointConfig", "Quantization", "parse_config", "read_config", "to_published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What a published ``config.json`` says.

    Attributes:
        text: The text model.
        model_type: ``kimi_k3`` (wrapper; tensor names start with ``language_model.``) or
            ``kimi_linear``.
        vision: The ``vision_config`` object as published, or None.
        quantization: The routed experts' packing, or None when all weights are plain.
        eos_token_ids: Stop ids named by the file.
        media_placeholder_token_id: Id of an image position, or None.
        raw: The file's content.
    """

    text: ModelConfig
    model_type: str
    vision: Mapping[str, Any] | None
    quantization: Quantization | None
    eos_token_ids: tuple[int, ...]
    media_placeholder_token_id: int | None
    raw: Mapping[str, Any]

    @property
    def is_wrapped(self) -> bool:
        """Whether text tensors carry the ``language_model.`` prefix."""
        return "text_config" in self.raw


def read_config(path: str | Path) -> CheckpointConfig:
    """Read ``config.json`` (or the one inside a directory).

    Raises:
        ConfigError: The file is absent, is not a JSON object or has an unusable field.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds a {type(raw).__name__}; a JSON object is needed")
    try:
        return parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def parse_config(raw: Mapping[str, Any]) -> CheckpointConfig:
    """Turn a published configuration object into frozen dataclasses.

    Raises:
        ConfigError: An unknown key, a missing field or a value outside the architecture.
    """
    wrapped = "text_config" in raw
    if wrapped:
        _refuse_unknown(raw, WRAPPER_KEYS | IRRELEVANT, "")
        text_raw = raw["text_config"]
        if not isinstance(text_raw, dict):
            raise ConfigError("text_config is not an object")
    else:
        text_raw = raw
    fields = _canonical(text_raw, "text_config." if wrapped else "")
    quantization = _quantization(raw, text_raw)
    eos_ids = _token_ids(raw if "eos_token_id" in raw else text_raw, "eos_token_id")
    vision = raw.get("vision_config") if wrapped else None
    return CheckpointConfig(
        text=_text_config(fields),
        model_type=str(raw.get("model_type", "kimi_k3" if wrapped else "kimi_linear")),
        vision=vision,
        quantization=None if quantization is None else parse_quantization(quantization),
        eos_token_ids=eos_ids,
        media_placeholder_token_id=raw.get("media_placeholder_token_id"),
        raw=raw,
    )


def _quantization(raw: Mapping[str, Any], text_raw: Mapping[str, Any]) -> Any:
    """The one quantization object; the wrapper may repeat what the text config says."""
    outer, inner = raw.get("quantization_config"), text_raw.get("quantization_config")
    if outer is not None and inner is not None and outer != inner:
        raise ConfigError("quantization_config differs between the wrapper and text_config")
    return outer if inner is None else inner


def _refuse_unknown(raw: Mapping[str, Any], known: frozenset[str], prefix: str) -> None:
    unknown = sorted(key for key in raw if key not in known)
    if unknown:
        raise ConfigError(
            "unknown configuration keys that could change the forward pass: "
            + ", ".join(prefix + key for key in unknown)
        )


def _canonical(raw: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Map transformers' renamed fields onto the published names and refuse unknown keys."""
    _refuse_unknown(raw, TEXT_KEYS | frozenset(RENAMED) | IRRELEVANT, prefix)
    fields = dict(raw)
    for new, old in RENAMED.items():
        if new not in fields:
            continue
        value = fields.pop(new)
        if old in fields and fields[old] != value:
            raise ConfigError(f"{prefix}{new} is {value!r} but {prefix}{old} is {fields[old]!r}")
        fields[old] = value
    return fields


def _get(fields: Mapping[str, Any], name: str, default: Any = None) -> Any:
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{name} is missing")
    return value


def _integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _get(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; an integer is needed")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _get(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ConfigError(f"{name} is {value!r}; a number is needed")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = _get(fields, name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; true or false is needed")
    return value


def _token_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One id or a list of ids; none where the field is absent."""
    value = fields.get(name)
    if value is None:
        return ()
    return _integers(value if isinstance(value, list) else [value], name)


def _integers(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ConfigError(f"{name} is {value!r}; integers are needed")
    return tuple(value)


def _names(fields: Mapping[str, Any], name: str, num_layers: int, *choices: str) -> list[str]:
    """A list that names one of ``choices`` for each layer."""
    value = fields[name]
    is_list = isinstance(value, list) and all(isinstance(x, str) for x in value)
    if not is_list or len(value) != num_layers or not set(value) <= set(choices):
        raise ConfigError(f"{name} must list {num_layers} of {', '.join(choices)}, got {value!r}")
    return value


def _linear_attention(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    linear = fields.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise ConfigError("linear_attn_config is not an object")
    return linear


def _optional_integer(fields: Mapping[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else _integer(fields, name)


def _optional_number(fields: Mapping[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else _number(fields, name)


def _text_config(fields: Mapping[str, Any]) -> ModelConfig:
    num_layers = _integer(fields, "num_hidden_layers", 32)
    heads = _integer(fields, "num_attention_heads", 32)
    _refuse_other_architectures(fields, heads)
    vocab_size = _integer(fields, "vocab_size", 163840)
    hidden_size = _integer(fields, "hidden_size", 4096)
    moe = _moe_config(fields)
    eos_ids = _token_ids(fields, "eos_token_id")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        intermediate_size=_integer(fields, "intermediate_size", 11008),
        kda_layers=_kda_layers(fields, num_layers),
        moe_layers=_moe_layers(fields, num_layers, moe),
        kda=_kda_config(fields),
        mla=MLAConfig(
            num_attention_heads=heads,
            q_lora_rank=_optional_integer(fields, "q_lora_rank"),
            kv_lora_rank=_integer(fields, "kv_lora_rank"),
            qk_nope_head_dim=_integer(fields, "qk_nope_head_dim"),
            qk_rope_head_dim=_integer(fields, "qk_rope_head_dim"),
            v_head_dim=_integer(fields, "v_head_dim"),
            mla_use_output_gate=_flag(fields, "mla_use_output_gate", False),
        ),
        moe=moe,
        hidden_act=str(_get(fields, "hidden_act", "silu")),
        activation_situ_beta=_number(fields, "activation_situ_beta", 1.0),
        activation_situ_linear_beta=_optional_number(fields, "activation_situ_linear_beta"),
        rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6),
        initializer_range=_number(fields, "initializer_range", 0.02),
        max_position_embeddings=_max_positions(fields),
        attn_res_block_size=_optional_integer(fields, "attn_res_block_size"),
        bos_token_id=_integer(fields, "bos_token_id", 1),
        eos_token_id=eos_ids[0] if eos_ids else 2,
        pad_token_id=_integer(fields, "pad_token_id", 0),
    )


def _max_positions(fields: Mapping[str, Any]) -> int:
    for name in ("max_position_embeddings", "model_max_length"):
        if fields.get(name) is not None:
            return _integer(fields, name)
    return 4096


def _refuse_other_architectures(fields: Mapping[str, Any], heads: int) -> None:
    if not _flag(fields, "mla_use_nope", False):
        raise ConfigError("mla_use_nope is false; only MLA without rotary embedding is K3")
    kv_heads = _integer(fields, "num_key_value_heads", heads)
    if kv_heads != heads:
        raise ConfigError(f"num_key_value_heads is {kv_heads}; it must equal {heads}")
    if _flag(fields, "tie_word_embeddings", False):
        raise ConfigError("tie_word_embeddings is true; K3 and Kimi-Linear keep both tables")
    if _flag(fields, "attention_bias", False):
        raise ConfigError("attention_bias is true; no projection of this family has a bias")
    if _integer(fields, "num_nextn_predict_layers", 0):
        raise ConfigError("num_nextn_predict_layers is not 0; MTP layers are not supported")


def _kda_config(fields: Mapping[str, Any]) -> KDAConfig:
    linear = _linear_attention(fields)
    known = {
        "kda_layers",
        "full_attn_layers",
        "num_heads",
        "head_dim",
        "short_conv_kernel_size",
        "gate_lower_bound",
        "use_full_rank_gate",
    }
    _refuse_unknown(linear, frozenset(known), "linear_attn_config.")
    merged = {
        "num_heads": linear.get("num_heads", fields.get("linear_num_heads")),
        "head_dim": linear.get("head_dim", fields.get("linear_head_dim")),
        "short_conv_kernel_size": linear.get(
            "short_conv_kernel_size", fields.get("linear_conv_kernel_dim", 4)
        ),
        "gate_lower_bound": linear.get("gate_lower_bound"),
        "use_full_rank_gate": linear.get("use_full_rank_gate"),
    }
    return KDAConfig(
        num_heads=_integer(merged, "num_heads"),
        head_dim=_integer(merged, "head_dim"),
        short_conv_kernel_size=_integer(merged, "short_conv_kernel_size"),
        gate_lower_bound=_optional_number(merged, "gate_lower_bound"),
        use_full_rank_gate=_flag(merged, "use_full_rank_gate", False),
    )


def _kda_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """0-based KDA layers, from explicit ``layer_types`` or the 1-based published list."""
    if fields.get("layer_types") is not None:
        kinds = ("linear_attention", "full_attention")
        types = _names(fields, "layer_types", num_layers, *kinds)
        return tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
    linear = _linear_attention(fields)
    if linear.get("kda_layers") is None:
        raise ConfigError("linear_attn_config.kda_layers is missing")
    listed = _integers(linear["kda_layers"], "linear_attn_config.kda_layers")
    layers = tuple(sorted(i - 1 for i in listed))
    full = linear.get("full_attn_layers")
    expected = {i + 1 for i in range(num_layers) if i not in layers}
    if full is not None and set(_integers(full, "full_attn_layers")) != expected:
        raise ConfigError("linear_attn_config.full_attn_layers is not the complement of kda_layers")
    return layers


def _moe_config(fields: Mapping[str, Any]) -> MoEConfig | None:
    if fields.get("num_experts") is None:
        return None
    return MoEConfig(
        num_experts=_integer(fields, "num_experts"),
        num_experts_per_token=_integer(fields, "num_experts_per_token"),
        moe_intermediate_size=_integer(fields, "moe_intermediate_size"),
        num_shared_experts=_integer(fields, "num_shared_experts", 0),
        routed_expert_hidden_size=_optional_integer(fields, "routed_expert_hidden_size"),
        latent_moe_use_norm=_flag(fields, "latent_moe_use_norm", False),
        routed_scaling_factor=_number(fields, "routed_scaling_factor", 1.0),
        moe_renormalize=_flag(fields, "moe_renormalize", True),
        moe_router_activation_func=str(_get(fields, "moe_router_activation_func", "sigmoid")),
        num_expert_group=_integer(fields, "num_expert_group", 1),
        topk_group=_integer(fields, "topk_group", 1),
    )


def _moe_layers(
    fields: Mapping[str, Any], num_layers: int, moe: MoEConfig | None
) -> tuple[int, ...]:
    if fields.get("mlp_layer_types") is not None:
        types = _names(fields, "mlp_layer_types", num_layers, "sparse", "dense")
        return tuple(i for i, kind in enumerate(types) if kind == "sparse")
    if moe is None:
        return ()
    first = _integer(fields, "first_k_dense_replace", 0)
    step = _integer(fields, "moe_layer_freq", 1)
    if step < 1:
        raise ConfigError(f"moe_layer_freq is {step}; it must be at least 1")
    return tuple(i for i in range(num_layers) if i >= first and i % step == 0)


def to_published(config: ModelConfig, *, quantized: bool = True) -> dict[str, Any]:
    """Return the K3 wrapper object for a text model, ready for ``json.dump``.

    Args:
        config: The text model.
        quantized: Whether routed experts ship as packed MXFP4.
    """
    from moonlet.core.hf_writer import published_object

    return published_object(config, quantized=quantized)
