"""Checkpoints of a run: safetensors for tensors, JSON for the rest (training.md section 16).

A checkpoint is a folder that appears under its final name only when complete, so a run killed
while saving resumes from the one before. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonlet.core.errors import CheckpointError

__all__ = ["RunCheckpoint", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

PREFIX = "step-"
TENSORS = "tensors.safetensors"
STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """What a run needs to continue bit for bit.

    Attributes:
        tensors: Masters, momenta, moments, balancing state, generator state.
        state: JSON values: step, cursors, guard, clocks, configuration hash.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint atomically and drop all but the newest ones.

    Args:
        folder: Parent of all checkpoints of the run; created when absent.
        step: Updates done; names the checkpoint.
        tensors: Tensors by name; views are written as separate tensors.
        state: JSON values.
        keep: Number of checkpoints that stay.

    Returns:
        The finished folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{PREFIX}{step:08d}"
    partial = folder / f".partial-{step:08d}"
    for leftover in (partial, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    save_file({name: t.detach().clone() for name, t in tensors.items()}, partial / TENSORS)
    text = json.dumps({"format": FORMAT, "step": step, **state}, indent=1)
    (partial / STATE).write_text(text, encoding="utf-8")
    for path in (partial / TENSORS, partial / STATE):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    partial.rename(target)
    for old in _checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def load_checkpoint(path: Path) -> RunCheckpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: A file is missing or of another format.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        tensors = load_file(path / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable run checkpoint: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')!r}, this version reads {FORMAT}"
        )
    return RunCheckpoint(tensors, state)


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.startswith(PREFIX) and p.is_dir())
