"""Synthetic checkpoints: random weights in the published layout, for any configuration.

They load wherever a real checkpoint of that configuration loads, so speed, memory and formats can
be measured without one. The values (`weights.random_values`) keep activations finite and mean
nothing. Shards are written tensor by tensor in pieces; memory does not grow with the model.

One shard per layer and one for the tables, as published; then one each for the projector and the
vision tower where the configuration has them.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonlet.core.budget import budget_of
from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError, CheckpointError, ConfigError
from moonlet.core.hf_config import CheckpointConfig, parse_config
from moonlet.core.units import format_bytes
from moonlet.weights.checkpoint import Checkpoint, OnProgress
from moonlet.weights.extents import DTYPE_BYTES
from moonlet.weights.folder import (
    SavedCheckpoint,
    json_bytes,
    leftovers,
    published_object,
    require_free,
    shard_name,
    staged_folder,
    write_index,
)
from moonlet.weights.names import TEXT_PREFIX, Slot, to_name
from moonlet.weights.random_values import random_bytes, rule_for
from moonlet.weights.shapes import TensorSpec, expected_tensors

__all__ = ["write_synthetic"]

TOKENIZER_FILES = (
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenization_kimi.py",
    "encoding_k3.py",
)

_CONFIG_NAME = "config.json"
_HEADER_ALIGNMENT = 8
# a header entry and an index entry of one tensor, generously
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One published tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: TensorSpec
    part: str

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * DTYPE_BYTES[self.dtype]


def write_synthetic(
    config: ModelConfig | Mapping[str, Any],
    directory: str | Path,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    *,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
) -> SavedCheckpoint:
    """Write a checkpoint of random weights.

    Args:
        config: Text configuration (`published_object` chooses the layout), or a published object
            that is written as it is and decides the layout.
        directory: Final folder; absent or empty unless ``overwrite``. It appears when everything
            is written and its headers have been read back.
        seed: Any integer; every tensor depends on it and on its own name only.
        on_progress: Called with ``(bytes done, bytes in total)``: once with 0 when all checks are
            passed and writing begins, then after each piece.
        tokenizer: Folder whose tokenizer files are copied, or None for none.
        overwrite: Replace a checkpoint that is there.

    Raises:
        ConfigError: The configuration is unusable, the folder holds files (or, with
            ``overwrite``, something else than a checkpoint), or it cannot be written.
        CapacityError: The disk has too little space; names both numbers.
        CheckpointError: The tokenizer is absent, malformed or of another size than the model.
    """
    raw = published_object(config) if isinstance(config, ModelConfig) else dict(config)
    parsed = parse_config(raw)
    target = Path(directory).resolve()
    total = budget_of(parsed).total_bytes
    files = [] if tokenizer is None else _tokenizer_files(Path(tokenizer), parsed)
    shards = _Shards(parsed)
    try:
        _require_target(target, overwrite)
        _require_space(target, total, sum(1 for shard in shards for _ in shard))
        with staged_folder(target) as staged:
            (staged / _CONFIG_NAME).write_bytes(json_bytes(raw))
            for file in files:
                shutil.copyfile(file, staged / file.name)
            saved = _write(shards, staged, seed, total, on_progress)
            Checkpoint.open(staged).report.raise_unless_loadable(str(target))
    except OSError as error:
        raise _unwritable(target, error) from error
    return SavedCheckpoint(target, saved.num_tensors, saved.total_size)


# ---- what can go wrong beforehand ---------------------------------------------------------------


def _tokenizer_files(directory: Path, config: CheckpointConfig) -> list[Path]:
    # only here: the vocabulary takes a while to import
    from moonlet.chat.tokenizer import Tokenizer

    size, wanted = Tokenizer.from_dir(directory).vocab_size, config.text.vocab_size
    if size != wanted:
        raise CheckpointError(
            f"the tokenizer in {directory} has {size} tokens, the model {wanted}; "
            "give one of the same size, or none"
        )
    return [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]


def _require_target(target: Path, overwrite: bool) -> None:
    if not overwrite:
        require_free(target)
    elif (target / _CONFIG_NAME).is_file() or not target.exists():
        return
    elif not target.is_dir() or any(target.iterdir()):
        # it could be a mistyped path
        raise ConfigError(
            f"{target} holds no {_CONFIG_NAME} and is not replaced; choose another folder"
        )


def _require_space(target: Path, num_bytes: int, num_tensors: int) -> None:
    """Check the disk; a checkpoint that will be replaced stays until the new one is whole."""
    needed = num_bytes + num_tensors * _ENTRY_BYTES
    place = next(path for path in target.parents if path.exists())
    free = shutil.disk_usage(place).free
    if free >= needed:
        return
    message = (
        f"{target} needs {needed:,} bytes ({format_bytes(needed)}), {place} has {free:,} "
        f"({format_bytes(free)}) free; choose another disk or a smaller scale"
    )
    remains = leftovers(target)
    if remains:
        message += f", or delete what interrupted runs left: {', '.join(map(str, remains))}"
    raise CapacityError(message)


def _unwritable(target: Path, error: OSError) -> CapacityError | ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"the disk became full while {target} was written; nothing is left")
    return ConfigError(f"cannot write {target}: {error}")


# ---- shards -------------------------------------------------------------------------------------


class _Shards:
    """The tensors of each shard in file order; a list is made when its shard's turn comes."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.config = config
        self._prefix = TEXT_PREFIX if config.is_wrapped else ""
        groups: dict[tuple[int, str], list[TensorSpec]] = {}
        for spec in expected_tensors(config).values():
            groups.setdefault(_group(spec), []).append(spec)
        self._specs = [groups[key] for key in sorted(groups)]

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[list[_Tensor]]:
        for specs in self._specs:
            tensors = [tensor for spec in specs for tensor in self._tensors(spec)]
            # the order of the safetensors library: wide types first, then by name
            yield sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))

    def _tensors(self, spec: TensorSpec) -> Iterator[_Tensor]:
        experts: Iterable[int | None] = (
            (None,) if spec.num_experts is None else range(spec.num_experts)
        )
        for expert in experts:
            for part in spec.parts:
                yield _Tensor(
                    name=to_name(Slot(spec.parameter, expert, part), self._prefix),
                    dtype=spec.part_dtype(part),
                    shape=spec.part_shape(part),
                    spec=spec,
                    part=part,
                )


def _group(spec: TensorSpec) -> tuple[int, str]:
    """Sort key of a shard: layers, then tables, projector and tower."""
    if spec.layer is not None:
        return spec.layer, ""
    # past every layer; vision tensors sort by their first word, text tables before them
    return 1 << 30, "" if spec.is_loaded else spec.parameter.partition(".")[0]


def _write(
    shards: _Shards, directory: Path, seed: int, total: int, on_progress: OnProgress | None
) -> SavedCheckpoint:
    weight_map: dict[str, str] = {}
    done = 0
    if on_progress is not None:
        on_progress(done, total)

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    for index, tensors in enumerate(shards):
        name = shard_name(index, len(shards))
        _write_shard(directory / name, tensors, shards.config.text, seed, advance)
        weight_map.update((tensor.name, name) for tensor in tensors)
    write_index(directory, weight_map, done)
    return SavedCheckpoint(directory, len(weight_map), done)


def _write_shard(
    file: Path,
    tensors: list[_Tensor],
    config: ModelConfig,
    seed: int,
    advance: Callable[[int], None],
) -> None:
    with file.open("wb") as handle:
        handle.write(_header(tensors))
        for tensor in tensors:
            for piece in _pieces(tensor, config, seed):
                handle.write(piece)
                advance(len(piece))


def _pieces(tensor: _Tensor, config: ModelConfig, seed: int) -> Iterator[memoryview | bytes]:
    spec = tensor.spec
    rule = rule_for(spec, tensor.part, config)
    drawn = tensor.num_values if spec.min_numel is None else spec.min_numel
    yield from random_bytes(seed, tensor.name, rule, tensor.dtype, drawn)
    padding = (tensor.num_values - drawn) * DTYPE_BYTES[tensor.dtype]
    if padding:
        yield bytes(padding)


def _header(tensors: Iterable[_Tensor]) -> bytes:
    """Return the start of a safetensors file: length and JSON, padded with spaces."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
