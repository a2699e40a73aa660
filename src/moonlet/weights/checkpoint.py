"""Opening a published checkpoint: configuration, extents and verification, without torch.

`Checkpoint.open` reads headers only, so that inspecting a 1.56 TB checkpoint takes seconds.
`load_model` builds the model and fills it; its work is in `moonlet.weights.loader`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moonlet.core.errors import CheckpointError
from moonlet.core.hf_config import CheckpointConfig, read_config
from moonlet.weights.extents import TensorExtent
from moonlet.weights.names import TEXT_PREFIX, Slot, is_vision
from moonlet.weights.report import VerificationReport, verify
from moonlet.weights.shapes import TensorSpec, expected_tensors
from moonlet.weights.shards import ShardSet, find_shards

if TYPE_CHECKING:
    import torch

    from moonlet.kernels.registry import Kernels
    from moonlet.weights.loader import LoadedModel

__all__ = ["Checkpoint", "OnProgress", "load_for_inference", "load_model"]

# called with (done, in total): bytes when loading or making, shards when writing a model
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint directory whose headers have been read and compared with its configuration.

    Attributes:
        expected: Tensors that the configuration demands, by parameter; without the vision tower
            where no vision tensor is there at all.
        report: Outcome of the comparison; not necessarily clean.
    """

    directory: Path
    config: CheckpointConfig
    shards: ShardSet
    expected: Mapping[str, TensorSpec]
    report: VerificationReport

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read configuration, index and shard headers, and verify them.

        Raises:
            ConfigError: ``config.json`` is absent or unusable.
            CheckpointError: The index is malformed or absent beside several shards.
            CorruptShard: A shard is truncated or malformed; names the file.
        """
        path = Path(directory)
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory; give a checkpoint folder")
        config = read_config(path)
        shards = find_shards(path)
        expected = expected_tensors(config)
        if shards.names and not any(_is_vision_name(name) for name in shards.names):
            # a text-only copy of a checkpoint keeps its config.json; the tower has no module here
            expected = {key: spec for key, spec in expected.items() if spec.is_loaded}
        return cls(
            directory=path,
            config=config,
            shards=shards,
            expected=expected,
            report=_verify(config, shards, expected),
        )

    @property
    def extents(self) -> Mapping[str, TensorExtent]:
        """Tensors of the existing shards, by name."""
        return self.shards.extents


def _is_vision_name(name: str) -> bool:
    return is_vision(Slot(name))


def _verify(
    config: CheckpointConfig, shards: ShardSet, expected: Mapping[str, TensorSpec]
) -> VerificationReport:
    if not shards.names:
        return VerificationReport(weights="absent")
    missing_files = set(shards.missing_files)
    return verify(
        expected,
        shards.extents,
        prefix=TEXT_PREFIX if config.is_wrapped else "",
        unread=(name for name, file in shards.names.items() if file in missing_files),
        weights=shards.weights,
        missing_shards=shards.missing_files if shards.files else (),
        misplaced=shards.misplaced,
        notes=_notes(config, shards),
    )


def _notes(config: CheckpointConfig, shards: ShardSet) -> tuple[str, ...]:
    notes: list[str] = []
    if config.vision is not None and not any(map(_is_vision_name, shards.names)):
        notes.append("config.json describes a vision tower; the checkpoint is text only")
    seen = sum(extent.length for extent in shards.extents.values())
    if not shards.missing_files and shards.total_size not in (None, seen):
        notes.append(f"the index says total_size {shards.total_size}, the shards hold {seen} bytes")
    return tuple(notes)


def load_model(
    directory: str | Path,
    dtype: torch.dtype | None = None,
    kernels: Kernels | None = None,
    on_progress: OnProgress | None = None,
    mode: str = "mmap",
) -> LoadedModel:
    """Build the text model of a checkpoint and fill every parameter.

    Args:
        directory: Checkpoint folder.
        dtype: Model dtype, float32 by default; small tensors stay float32 whatever it is.
        kernels: Operator table, or None for the model's default.
        on_progress: Called with ``(bytes done, bytes in total)`` after each tensor.
        mode: ``mmap`` or ``pread``.

    Raises:
        ConfigError: The configuration is unusable.
        CheckpointError: The checkpoint does not hold exactly the model's tensors, or a value is
            one that no valid checkpoint has.
    """
    import torch

    from moonlet.weights.loader import load_checkpoint

    return load_checkpoint(
        Checkpoint.open(directory),
        dtype=torch.float32 if dtype is None else dtype,
        kernels=kernels,
        on_progress=on_progress,
        mode=mode,
    )


def load_for_inference(
    directory: str | Path,
    kernels: Mapping[str, str] | str = "auto",
    on_progress: OnProgress | None = None,
    mode: str = "pread",
    moe_activation: str = "bf16",
    trunk: str = "stored",
    trunk_activation: str = "bf16",
) -> LoadedModel:
    """Build the text model of a checkpoint for inference, with weights as they are stored.

    Matrices keep their published bytes (bfloat16, packed MXFP4) and activations are float32. Where
    the native kernels cannot run, everything is widened to float32 and the torch operators serve.

    Args:
        directory: Checkpoint folder.
        kernels: Wanted backends, as in `kernels.registry.resolve`.
        on_progress: Called with ``(bytes done, bytes in total)`` after each tensor.
        mode: ``mmap`` or ``pread``.
        moe_activation: Rounding of the routed experts' inputs; ``bf16`` is none.
        trunk: ``stored``, or ``int8`` for one scale per row (`weights.trunk`).
        trunk_activation: Rounding of the inputs of an int8 trunk: ``int8`` groups, or ``bf16`` for
            none.

    Raises:
        ConfigError: The configuration or an option is unusable.
        CheckpointError: The checkpoint does not hold exactly the model's tensors.
        BackendUnavailable: A named backend cannot serve.
    """
    from moonlet.weights.loader import check_precision, load_checkpoint, set_precision

    check_precision(moe_activation, trunk, trunk_activation)
    loaded = load_checkpoint(
        Checkpoint.open(directory),
        dtype=None,
        kernels=kernels,
        on_progress=on_progress,
        mode=mode,
    )
    set_precision(loaded.model, moe_activation, trunk, trunk_activation)
    return loaded
