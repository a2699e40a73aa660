"""A checkpoint folder as it is written: configuration, index, and a place beside the target.

A folder is filled beside its final place and renamed at the end: readers see either no checkpoint
or a whole one. Needs no torch.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import to_published
from moonlet.weights.shards import INDEX_NAME

__all__ = [
    "SavedCheckpoint",
    "json_bytes",
    "leftovers",
    "published_object",
    "require_free",
    "shard_name",
    "staged_folder",
    "write_index",
]

_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """What was written.

    Attributes:
        total_size: Bytes of all tensors, as in the index.
    """

    directory: Path
    num_tensors: int
    total_size: int


def published_object(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a text model in the layout of its family.

    With AttnRes it is the K3 wrapper with packed experts, without it the bare Kimi-Linear object.
    """
    if config.attn_res_block_size is not None:
        return to_published(config, quantized=config.moe is not None)
    return to_published(config, quantized=False)["text_config"]


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def shard_name(shard: int, num_shards: int) -> str:
    """Return the published file name of 0-based ``shard``."""
    return f"model-{shard + 1:05d}-of-{num_shards:06d}.safetensors"


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write the index: shard file by tensor name, and the bytes of all tensors."""
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX_NAME).write_bytes(json_bytes(index))


def require_free(target: Path) -> None:
    """Check that nothing would be overwritten.

    Raises:
        ConfigError: The target is a file or a folder that holds something.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; choose another folder or overwrite")


@contextmanager
def staged_folder(target: Path) -> Generator[Path]:
    """Give a new folder beside ``target`` that takes its place when the block ends well.

    A folder that is there before is replaced. After an error nothing of the new folder is left;
    a process that is killed leaves it under another name (see `leftovers`).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # a folder inside the private one of mkdtemp: it becomes as readable as any other new folder
    holder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_PARTIAL, dir=target.parent))
    try:
        staged = holder / "checkpoint"
        staged.mkdir()
        yield staged
        _move_into_place(staged, target, holder / "replaced")
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def leftovers(target: Path) -> list[Path]:
    """Return the folders that writers of ``target`` left behind when killed, or still fill."""
    if not target.parent.is_dir():
        return []
    return sorted(
        path
        for path in target.parent.iterdir()
        if path.name.startswith(f".{target.name}.") and path.name.endswith(_PARTIAL)
    )


def _move_into_place(staged: Path, target: Path, replaced: Path) -> None:
    """Rename a finished folder; the folder it replaces comes back if that fails."""
    if target.exists():
        target.rename(replaced)
    try:
        staged.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
