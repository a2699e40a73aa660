"""Filling a model from a verified checkpoint, shard by shard.

Rules on values are applied here (model.md sections 2.4 and 2.6): ``A_log`` is flattened and its
padding must be zero; packed matrices are dequantised one at a time where the model does not read
them packed, and a scale code of 255 (NaN) stops the load. Temporary memory is one tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moonlet.core.errors import CheckpointError, ConfigError, TensorShapeMismatch
from moonlet.core.hf_config import CheckpointConfig
from moonlet.kernels import mxfp4
from moonlet.kernels.moe_mxfp4.reference import MODES
from moonlet.kernels.registry import resolve
from moonlet.model.latent_moe import Experts
from moonlet.model.transformer import Transformer
from moonlet.weights.checkpoint import Checkpoint, OnProgress
from moonlet.weights.extents import TensorExtent
from moonlet.weights.names import PACKED, SCALE, TEXT_PREFIX, Slot, is_vision, to_name, to_slot
from moonlet.weights.reader import ShardReader
from moonlet.weights.report import VerificationReport
from moonlet.weights.stored import build_as_stored, reads_as_stored
from moonlet.weights.trunk import quantize_trunk

__all__ = [
    "LoadedModel",
    "check_precision",
    "flatten_a_log",
    "load_checkpoint",
    "load_into",
    "set_precision",
]

logger = logging.getLogger(__name__)

TRUNKS = ("stored", "int8")
TRUNK_ACTIVATIONS = ("bf16", "int8")

# E8M0 code of NaN
_NAN_SCALE = 255


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A filled model, in evaluation mode, with the configuration and report it came with."""

    model: Transformer
    config: CheckpointConfig
    report: VerificationReport


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None,
    kernels: Any = None,
    on_progress: OnProgress | None = None,
    mode: str = "mmap",
) -> LoadedModel:
    """Build the model of an opened checkpoint and fill it.

    Args:
        checkpoint: Opened and clean.
        dtype: Of every parameter, see `load_model`; None for inference on weights as stored, see
            `load_for_inference`.
        kernels: A `Kernels` table with a dtype; wanted backends without one.
        on_progress: Called with ``(bytes done, bytes in total)`` after each tensor.
        mode: ``mmap`` or ``pread``.
    """
    checkpoint.report.raise_unless_loadable(str(checkpoint.directory))
    if dtype is None:
        config = checkpoint.config.text
        chosen = resolve("cpu", config, kernels or "auto", is_inference=True)
        if reads_as_stored(chosen):
            model = build_as_stored(config, chosen, checkpoint.extents)
        else:
            model = Transformer(config, chosen, attn_res_form="two_phase")
    else:
        model = Transformer(
            checkpoint.config.text, kernels=kernels, dtype=dtype, attn_res_form="two_phase"
        )
    load_into(model, checkpoint, on_progress=on_progress, mode=mode)
    model.eval()
    return LoadedModel(model, checkpoint.config, checkpoint.report)


@torch.no_grad()
def load_into(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    *,
    on_progress: OnProgress | None = None,
    mode: str = "mmap",
) -> None:
    """Fill every parameter and buffer of a model in place.

    Args:
        model: Modified in place; parameters keep their dtype and device.
        checkpoint: Opened and clean.
        on_progress: Called with ``(bytes done, bytes in total)`` after each tensor.
        mode: ``mmap`` or ``pread``.

    Raises:
        CheckpointError: The report is not clean, a value is invalid, or the model has parameters
            that no tensor fills.
    """
    checkpoint.report.raise_unless_loadable(str(checkpoint.directory))
    targets = _targets(model)
    unfilled = _expected_counts(checkpoint)
    _compare({_matrix_of(name) for name in targets}, set(unfilled))
    total = sum(e.length for e in checkpoint.extents.values() if not _is_skipped(e.name))
    done = 0
    with ShardReader(checkpoint.extents, mode) as reader:
        for file_extents in _by_file(checkpoint.extents):
            for extent in file_extents:
                slot = to_slot(extent.name)
                if slot is None or slot.part == SCALE or is_vision(slot):
                    continue
                done += _fill(targets, slot, extent, checkpoint, reader)
                unfilled[slot.parameter] -= 1
                if on_progress is not None:
                    on_progress(done, total)
            reader.release(file_extents[0].file)
    left = sorted(name for name, count in unfilled.items() if count)
    if left:
        raise CheckpointError(f"parameters not filled exactly once: {', '.join(left)}")


def check_precision(moe_activation: str, trunk: str, trunk_activation: str) -> None:
    """Check the arguments of `set_precision` before a model is loaded.

    Raises:
        ConfigError: A value is unknown, or values do not go together.
    """
    if moe_activation not in MODES:
        raise ConfigError(f"moe_activation is {moe_activation!r}; choose one of {', '.join(MODES)}")
    if trunk not in TRUNKS:
        raise ConfigError(f"trunk is {trunk!r}; choose one of {', '.join(TRUNKS)}")
    if trunk_activation not in TRUNK_ACTIVATIONS:
        choices = ", ".join(TRUNK_ACTIVATIONS)
        raise ConfigError(f"trunk_activation is {trunk_activation!r}; choose one of {choices}")
    if trunk_activation == "int8" and trunk != "int8":
        raise ConfigError(f"trunk_activation int8 needs trunk int8; trunk is {trunk}")


def set_precision(
    model: Transformer, moe_activation: str, trunk: str, trunk_activation: str
) -> None:
    """Set how a loaded model rounds the experts' inputs, stores its trunk and rounds its inputs.

    Args:
        model: Modified in place.
        moe_activation: A mode that `check_precision` knows, like the others.
        trunk: ``stored`` or ``int8``.
        trunk_activation: ``bf16`` or ``int8``.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            module.activation_mode = moe_activation
            module.activation_transform = MODES[moe_activation]
    if trunk == "int8":
        report = quantize_trunk(model, trunk_activation)
        logger.info(
            "int8 trunk: %d matrices, %d bytes instead of %d, relative error %.2e",
            *(report.num_matrices, report.bytes_after, report.bytes_before, report.relative_error),
        )


def flatten_a_log(name: str, value: Tensor, num_heads: int) -> Tensor:
    """Return the per-head values of a published ``A_log``, float32 ``[H]``.

    Args:
        name: Tensor name, for messages.
        value: Any shape; K3 pads ``[H]`` with zeros, Kimi-Linear writes ``[1, 1, H, 1]``.
        num_heads: H.

    Raises:
        TensorShapeMismatch: Fewer than H values.
        CheckpointError: A value after the first H is not zero.
    """
    flat = value.reshape(-1)
    if flat.numel() < num_heads:
        raise TensorShapeMismatch(f"{name} has {flat.numel()} values for {num_heads} heads")
    tail = flat[num_heads:]
    if bool(torch.any(tail != 0)):
        raise CheckpointError(
            f"{name} has {int(torch.count_nonzero(tail))} non-zero values after its {num_heads} "
            "heads; padding must be zero, so these are not per-head values"
        )
    return flat[:num_heads].float()


def _targets(model: torch.nn.Module) -> dict[str, Tensor]:
    # the names a state dict has: parameters and persistent buffers
    return dict(model.state_dict(keep_vars=True))


def _expected_counts(checkpoint: Checkpoint) -> dict[str, int]:
    """How many reads fill each loaded parameter: one, or one per expert."""
    return {
        name: 1 if spec.num_experts is None else spec.num_experts
        for name, spec in checkpoint.expected.items()
        if spec.is_loaded
    }


def _compare(in_model: set[str], in_checkpoint: set[str]) -> None:
    differing = sorted(in_model ^ in_checkpoint)
    if differing:
        raise CheckpointError(
            f"model and checkpoint layout disagree on {', '.join(differing[:20])}; "
            "the model was not built from this checkpoint's config.json"
        )


def _is_skipped(name: str) -> bool:
    slot = to_slot(name)
    return slot is None or is_vision(slot)


def _by_file(extents: Mapping[str, TensorExtent]) -> Iterator[list[TensorExtent]]:
    """Group extents by shard, each in the order of the file."""
    groups: dict[str, list[TensorExtent]] = {}
    for extent in extents.values():
        groups.setdefault(str(extent.file), []).append(extent)
    for file in sorted(groups):
        yield sorted(groups[file], key=lambda extent: extent.offset)


def _fill(
    targets: Mapping[str, Tensor],
    slot: Slot,
    extent: TensorExtent,
    checkpoint: Checkpoint,
    reader: ShardReader,
) -> int:
    """Copy one tensor (with its scales, if packed) into place; return the bytes read."""
    value, num_bytes = reader.read(extent.name), extent.length
    target = targets.get(slot.parameter)
    if slot.part == PACKED:
        scale_name = _scale_name(extent.name, slot)
        scale = reader.read(scale_name)
        if bool(torch.any(scale == _NAN_SCALE)):
            raise CheckpointError(
                f"{scale_name} holds the scale code {_NAN_SCALE} (NaN); the shard is damaged"
            )
        num_bytes += checkpoint.extents[scale_name].length
        codes_target, scale_target = _pair_targets(slot)
        if scale_target in targets:
            _place(targets[scale_target], slot, scale_name, scale)
            target = targets[codes_target]
        elif target is not None:
            value = mxfp4.dequantize(value, scale, dtype=target.dtype)
    elif slot.parameter.endswith(".A_log"):
        value = flatten_a_log(extent.name, value, checkpoint.config.text.kda.num_heads)
    assert target is not None, "the layouts were compared"
    _place(target, slot, extent.name, value)
    return num_bytes


def _place(target: Tensor, slot: Slot, name: str, value: Tensor) -> None:
    """Copy a value into its parameter or its expert's part of it."""
    place = target if slot.expert is None else target[slot.expert]
    if place.shape != value.shape:
        raise TensorShapeMismatch(
            f"{name} is {list(value.shape)}, the model's {slot.parameter} is {list(place.shape)}"
        )
    place.copy_(value)


def _pair_targets(slot: Slot) -> tuple[str, str]:
    """Codes and scales in a model that reads the matrix packed: `Experts.pack`, `Linear.pack`."""
    if slot.expert is not None:
        return f"{slot.parameter}_packed", f"{slot.parameter}_scale"
    return slot.parameter, slot.parameter.removesuffix("weight") + "scale"


def _matrix_of(name: str) -> str:
    """Name of the parameter that a part of a packed pair stands for."""
    if name.endswith(".scale"):
        return name.removesuffix("scale") + "weight"
    return name.removesuffix("_packed").removesuffix("_scale")


def _scale_name(packed_name: str, slot: Slot) -> str:
    prefix = TEXT_PREFIX if packed_name.startswith(TEXT_PREFIX) else ""
    return to_name(slot._replace(part=SCALE), prefix)
