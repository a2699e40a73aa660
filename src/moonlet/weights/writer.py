"""Writing a model in the published layout, so that any engine for K3 or Kimi-Linear loads it.

One shard per layer and a last one for the tables, an index with ``metadata.total_size``,
``config.json``, and the tokenizer's files as given. K3 layout: ``language_model.`` prefix, packed
experts, ``A_log`` padded with zeros to ``head_dim``. Kimi-Linear layout (a bare text config): no
prefix, plain experts, ``A_log`` as ``[1, 1, H, 1]``.

The folder is written beside its final place, read back and verified, then renamed: readers see
either no checkpoint or a whole one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.core.errors import CheckpointError, ConfigError, TensorShapeMismatch
from moonlet.core.hf_config import CheckpointConfig, parse_config
from moonlet.core.storage import storage_of
from moonlet.kernels import mxfp4
from moonlet.weights.checkpoint import Checkpoint, OnProgress
from moonlet.weights.folder import (
    SavedCheckpoint,
    json_bytes,
    published_object,
    require_free,
    shard_name,
    staged_folder,
    write_index,
)
from moonlet.weights.names import PACKED, SCALE, TEXT_PREFIX, Slot, to_name
from moonlet.weights.reader import TORCH_DTYPES
from moonlet.weights.shapes import TensorSpec, text_tensors
from moonlet.weights.shards import INDEX_NAME

__all__ = ["SavedCheckpoint", "published_object", "save_model", "to_stored_dtype"]

_SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def save_model(
    model: torch.nn.Module,
    directory: str | Path,
    config: ModelConfig | Mapping[str, Any],
    tokenizer_files: Mapping[str, bytes | Path] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> SavedCheckpoint:
    """Write a text model as a published checkpoint.

    Args:
        model: Parameters in float32, bfloat16 or float16. Rounding to bf16 is to nearest even,
            packing is MXFP4 by the rule of the published checkpoints.
        directory: Final folder; absent or empty unless ``overwrite``.
        config: Text configuration (`published_object` chooses the layout), or a published object
            that is written as it is and decides the layout.
        tokenizer_files: File name to content, or to a file to copy.
        generation_config: Content of ``generation_config.json``, or None for no such file.
        overwrite: Replace a folder that holds files.
        on_progress: Called with ``(shards done, shards in total)`` after each shard.

    Raises:
        ConfigError: The folder holds files, a file name is a path, or the configuration is
            unusable.
        CheckpointError: A parameter is missing, superfluous, of another shape or not finite.
    """
    target = Path(directory)
    raw = published_object(config) if isinstance(config, ModelConfig) else dict(config)
    parsed = parse_config(raw)
    files = _extra_files(raw, tokenizer_files or {}, generation_config)
    if not overwrite:
        require_free(target)
    with staged_folder(target) as staged:
        saved = _write(model, staged, parsed, on_progress)
        for name, content in files.items():
            if isinstance(content, Path):
                shutil.copyfile(content, staged / name)
            else:
                (staged / name).write_bytes(content)
        Checkpoint.open(staged).report.raise_unless_loadable(str(target))
    return SavedCheckpoint(target, saved.num_tensors, saved.total_size)


def to_stored_dtype(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a parameter to its published dtype, to nearest with ties to even.

    Raises:
        CheckpointError: The parameter has a dtype that would be rounded twice, or a value is not
            finite after rounding.
    """
    if value.dtype not in _SOURCE_DTYPES:
        raise CheckpointError(f"{name} is {value.dtype}; float32, bfloat16 or float16 is needed")
    rounded = value.detach().to(device="cpu", dtype=dtype).contiguous()
    if not bool(torch.isfinite(rounded).all()):
        raise CheckpointError(f"{name} holds values that are not finite in {dtype}")
    return rounded


def _extra_files(
    raw: Mapping[str, Any],
    tokenizer_files: Mapping[str, bytes | Path],
    generation_config: Mapping[str, Any] | None,
) -> dict[str, bytes | Path]:
    files: dict[str, bytes | Path] = {"config.json": json_bytes(raw)}
    if generation_config is not None:
        files["generation_config.json"] = json_bytes(generation_config)
    for name, content in tokenizer_files.items():
        if Path(name).name != name or name in files or name.endswith(".safetensors"):
            raise ConfigError(f"tokenizer file {name!r} needs a plain name of its own")
        files[name] = content
    return files


@torch.no_grad()
def _write(
    model: torch.nn.Module,
    directory: Path,
    config: CheckpointConfig,
    on_progress: OnProgress | None,
) -> SavedCheckpoint:
    values = {name: value.detach() for name, value in model.state_dict().items()}
    specs = list(text_tensors(config.text, storage_of(config)))
    differing = sorted(set(values) ^ {spec.parameter for spec in specs})
    if differing:
        raise CheckpointError(
            f"model and configuration disagree on {', '.join(differing[:20])}; "
            "write a model with the configuration it was built from"
        )
    prefix = TEXT_PREFIX if config.is_wrapped else ""
    num_shards = config.text.num_hidden_layers + 1
    weight_map: dict[str, str] = {}
    total_size = 0
    # the shard writer makes private files; they become as readable as this new one
    (directory / INDEX_NAME).touch()
    readable = (directory / INDEX_NAME).stat().st_mode
    for shard in range(num_shards):
        file = shard_name(shard, num_shards)
        layer = shard if shard < config.text.num_hidden_layers else None
        tensors: dict[str, Tensor] = {}
        for spec in specs:
            if spec.layer == layer:
                tensors.update(_published_tensors(spec, values[spec.parameter], prefix, config))
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(readable)
        weight_map.update(dict.fromkeys(tensors, file))
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        if on_progress is not None:
            on_progress(shard + 1, num_shards)
    write_index(directory, weight_map, total_size)
    return SavedCheckpoint(directory, len(weight_map), total_size)


def _published_tensors(
    spec: TensorSpec, value: Tensor, prefix: str, config: CheckpointConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the published names and tensors of one parameter."""
    dtype = TORCH_DTYPES[spec.dtype]
    if spec.num_experts is None:
        if spec.min_numel is not None:
            value = _published_a_log(spec, value)
        _check_shape(spec.parameter, value.shape, spec.shape)
        yield to_name(Slot(spec.parameter), prefix), to_stored_dtype(spec.parameter, value, dtype)
        return
    _check_shape(spec.parameter, value.shape, (spec.num_experts, *spec.shape))
    for expert, matrix in enumerate(value):
        owner = f"{spec.parameter}[{expert}]"
        if not spec.packed:
            name = to_name(Slot(spec.parameter, expert), prefix)
            yield name, to_stored_dtype(owner, matrix, dtype)
            continue
        # through float32: packing rounds once, from the master value
        packed, scale = mxfp4.quantize(to_stored_dtype(owner, matrix, torch.float32))
        yield to_name(Slot(spec.parameter, expert, PACKED), prefix), packed.contiguous()
        yield to_name(Slot(spec.parameter, expert, SCALE), prefix), scale.contiguous()


def _published_a_log(spec: TensorSpec, value: Tensor) -> Tensor:
    """Pad ``[H]`` with zeros to the published length, or give it the bare layout's four axes."""
    _check_shape(spec.parameter, value.shape, (spec.min_numel or 0,))
    padded = value.new_zeros(torch.Size(spec.shape).numel())
    padded[: value.numel()] = value
    return padded.reshape(spec.shape)


def _check_shape(name: str, seen: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(seen) != tuple(wanted):
        raise TensorShapeMismatch(f"{name} is {list(seen)}; the configuration says {list(wanted)}")
