"""From a checkpoint directory to a running engine with its tokenizer and defaults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from moonlet.chat.tokenizer import Tokenizer
from moonlet.core.budget import budget_of
from moonlet.core.errors import CheckpointError, ConfigError
from moonlet.core.hf_config import CheckpointConfig
from moonlet.engine.engine import Engine
from moonlet.engine.limits import DEFAULT_CLASS, PriorityClass
from moonlet.engine.memory import DEFAULT_MEMORY, MemoryOptions
from moonlet.engine.speculative import SpeculativeConfig
from moonlet.serve.settings import GenerationDefaults, read_generation_defaults
from moonlet.weights.checkpoint import load_for_inference, load_model

__all__ = ["EngineOptions", "LoadedEngine", "load_engine"]

Dtype = Literal["float32", "bfloat16"]

# what a fingerprint reads of a large file
_NUM_PIECES, _PIECE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How much the engine may hold.

    Attributes:
        max_model_len: Prompt and output of one request; the checkpoint's limit when None.
        max_num_seqs: Requests computed at the same time.
        max_num_batched_tokens: Tokens per forward pass; the engine's default when None.
        dtype: Of activations and latent rows; with float32, weights keep their stored bytes.
        moe_activation: Rounding of the routed experts' inputs; ``bf16`` is none.
        trunk: ``stored``, or ``int8`` for the matrices outside the experts.
        trunk_activation: Rounding of the inputs of an int8 trunk; ``bf16`` is none.
        classes: Priority classes, the most important one first.
        speculative: How to draft; None decodes token by token.
        memory: Sizes of the cache; the fingerprint is filled in here.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    dtype: Dtype = "float32"
    moe_activation: str = "bf16"
    trunk: str = "stored"
    trunk_activation: str = "bf16"
    classes: tuple[PriorityClass, ...] = (DEFAULT_CLASS,)
    speculative: SpeculativeConfig | None = None
    memory: MemoryOptions = DEFAULT_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A running engine and what came with its checkpoint.

    Attributes:
        engine: The caller closes it.
        tokenizer: The checkpoint's vocabulary.
        defaults: Its generation_config.json.
        config: Its config.json.
        num_parameters: Of the text model.
    """

    engine: Engine
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    config: CheckpointConfig
    num_parameters: int


def _precision(options: EngineOptions) -> tuple[str, ...]:
    """What changes the numbers of a model that computes in float32."""
    return options.moe_activation, options.trunk, options.trunk_activation


def _fingerprint(directory: Path, options: EngineOptions) -> bytes:
    """Identify weights and numerics.

    Small files count whole, of a large one pieces that lie evenly in it: two trainings of one
    architecture have shards of the same names, sizes and headers, but not the same values.
    """
    digest = hashlib.sha256(" ".join((options.dtype, *_precision(options))).encode())
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        step = max(_PIECE_BYTES, size // _NUM_PIECES)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(_PIECE_BYTES))
    return digest.digest()


def load_engine(
    directory: Path,
    options: EngineOptions,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedEngine:
    """Load a checkpoint and start its engine; the caller closes the engine.

    Generation stops at every id that any of the checkpoint's files calls an end: config.json,
    generation_config.json and the tokenizer do not always agree.

    Args:
        directory: Published layout.
        options: Limits of the engine.
        on_progress: Called with ``(bytes done, bytes in total)``.

    Raises:
        CheckpointError: Files are missing, corrupt or do not fit each other.
        ConfigError: An option does not fit the checkpoint.
    """
    # small files first: they fail fast
    tokenizer = Tokenizer.from_dir(directory)
    defaults = read_generation_defaults(directory)
    if options.dtype == "float32":
        loaded = load_for_inference(
            directory,
            on_progress=on_progress,
            moe_activation=options.moe_activation,
            trunk=options.trunk,
            trunk_activation=options.trunk_activation,
        )
    elif _precision(options) != _precision(EngineOptions()):
        raise ConfigError(
            f"moe_activation, trunk and trunk_activation need dtype float32, not {options.dtype}"
        )
    else:
        loaded = load_model(directory, dtype=torch.bfloat16, on_progress=on_progress)
    vocab_size = loaded.config.text.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"{vocab_size}; they do not belong together"
        )
    stop_ids = {*loaded.config.eos_token_ids, *defaults.eos_token_ids, *tokenizer.stop_ids}
    engine = Engine(
        loaded.model,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        stop_ids=stop_ids,
        classes=options.classes,
        speculative=options.speculative,
        memory=replace(options.memory, fingerprint=_fingerprint(directory, options)),
    )
    return LoadedEngine(
        engine=engine,
        tokenizer=tokenizer,
        defaults=defaults,
        config=loaded.config,
        num_parameters=budget_of(loaded.config).text_parameters,
    )
