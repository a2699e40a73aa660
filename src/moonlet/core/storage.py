"""How a published checkpoint stores each kind of tensor (model.md sections 2.2 and 2.3).

Two layouts are published. K3 packs routed experts as MXFP4, keeps the small KDA tensors in
float32 and pads ``A_log`` with zeros up to ``head_dim``. Kimi-Linear ships plain experts, bf16
convolutions and ``A_log`` as ``[1, 1, H, 1]``.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonlet.core.config import KDAConfig, ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import CheckpointConfig
from moonlet.core.hf_quantization import MXFP4_GROUP_SIZE

__all__ = [
    "K3_STORAGE",
    "KIMI_LINEAR_STORAGE",
    "Storage",
    "require_packable",
    "storage_of",
]

# published dtype names (safetensors) of the declared ``dtype``
_PLAIN_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """On-disk dtypes of a text model, as safetensors dtype names.

    Attributes:
        is_wrapped: K3 layout: names start with ``language_model.`` and ``A_log`` is flat, padded
            with zeros to ``head_dim`` where that is larger than the head count.
        packs_experts: Routed experts are MXFP4 ``weight_packed`` / ``weight_scale`` pairs.
        plain: Every tensor not named below.
        kda_small: ``{q,k,v}_conv1d`` and ``o_norm``.
        gate: ``A_log``, ``dt_bias`` and ``e_score_correction_bias``.
    """

    is_wrapped: bool
    packs_experts: bool
    plain: str = "BF16"
    kda_small: str
    gate: str = "F32"

    @property
    def plain_bytes(self) -> int:
        """Bytes of one element of a plain tensor."""
        return _DTYPE_BYTES[self.plain]

    @property
    def kda_small_bytes(self) -> int:
        """Bytes of one element of ``conv1d`` and ``o_norm``."""
        return _DTYPE_BYTES[self.kda_small]

    @property
    def gate_bytes(self) -> int:
        """Bytes of one element of ``A_log``, ``dt_bias`` and the correction bias."""
        return _DTYPE_BYTES[self.gate]

    def a_log_shape(self, kda: KDAConfig) -> tuple[int, ...]:
        """Shape of ``A_log`` on disk."""
        if self.is_wrapped:
            return (max(kda.num_heads, kda.head_dim),)
        return (1, 1, kda.num_heads, 1)


K3_STORAGE = Storage(is_wrapped=True, packs_experts=True, kda_small="F32")
KIMI_LINEAR_STORAGE = Storage(is_wrapped=False, packs_experts=False, kda_small="BF16")


def storage_of(config: CheckpointConfig) -> Storage:
    """Return the layout that a ``config.json`` declares.

    Raises:
        ConfigError: The declared ``dtype`` is none of bfloat16, float16, float32.
    """
    declared = config.raw.get("dtype") or config.raw.get("torch_dtype") or "bfloat16"
    name = str(declared).removeprefix("torch.")
    if name not in _PLAIN_DTYPES:
        raise ConfigError(f"dtype is {declared!r}; choose one of {', '.join(_PLAIN_DTYPES)}")
    plain = _PLAIN_DTYPES[name]
    return Storage(
        is_wrapped=config.is_wrapped,
        packs_experts=config.quantization is not None,
        plain=plain,
        kda_small="F32" if config.is_wrapped else plain,
    )


def require_packable(config: ModelConfig) -> None:
    """Check that expert matrices divide into MXFP4 groups along their input axis.

    Raises:
        ConfigError: An expert's input or intermediate width is no multiple of the group size.
    """
    if config.moe is None:
        return
    widths = {
        "expert input width": config.expert_input_size,
        "moe_intermediate_size": config.moe.moe_intermediate_size,
    }
    for name, width in widths.items():
        if width % MXFP4_GROUP_SIZE:
            raise ConfigError(
                f"{name} is {width}; packed experts need a multiple of {MXFP4_GROUP_SIZE}"
            )
