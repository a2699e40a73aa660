"""Recipes: a whole training run in one TOML file, read strictly (`core.tables`).

The resolved recipe has a hash, which a resumed run must share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.core.tables import from_table
from moonlet.train.init import InitOptions
from moonlet.train.optimizer import OptimizerOptions
from moonlet.train.qat import ACTIVATION_FORMATS
from moonlet.train.schedule import CosineSchedule

__all__ = [
    "BalancingOptions",
    "DataOptions",
    "QuantizationOptions",
    "Recipe",
    "RunOptions",
    "load_recipe",
    "parse_recipe",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """The token stream.

    Attributes:
        tokens_per_step: Upper bound on tokens of one update, over all shards.
        num_shards: Logical data shards; processes must divide it.
        seed: Seed of the sample source.
        num_ranks: Vocabulary without reserved ids that the tokenizer trainer aims at.
        tokenizer_samples: Rendered samples in the tokenizer's corpus.
    """

    tokens_per_step: int = 8192
    num_shards: int = 2
    seed: int = 0
    num_ranks: int = 640
    tokenizer_samples: int = 4000

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.num_shards < 1:
            raise ConfigError(f"data.num_shards is {self.num_shards}; at least 1")
        if self.tokens_per_step < self.num_shards:
            raise ConfigError(
                f"data.tokens_per_step is {self.tokens_per_step}; at least one per shard"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancingOptions:
    """Quantile Balancing.

    Attributes:
        num_bins: Histogram resolution.
        ema: Weight of the past in the required bias, or None.
    """

    num_bins: int = 1000
    ema: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOptions:
    """Quantisation-aware training.

    Attributes:
        start_fraction: Position in the run where fake quantisation begins; 1 switches it off.
        activations: ``none`` or ``mxfp8`` for the experts' inputs.
    """

    start_fraction: float = 0.75
    activations: str = "none"

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0 <= self.start_fraction <= 1:
            raise ConfigError(
                f"quantization.start_fraction is {self.start_fraction}; it must be in [0, 1]"
            )
        if self.activations not in ACTIVATION_FORMATS:
            raise ConfigError(
                f"quantization.activations is {self.activations!r}; "
                f"choose one of {', '.join(ACTIVATION_FORMATS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Running of the loop.

    Attributes:
        qk_clip_tau: Bound on MLA logits.
        max_loss_ratio: A step whose loss exceeds this many times the running mean is skipped.
        checkpoint_minutes: Wall time between checkpoints.
        kernels: Backend per operator, as `registry.resolve` takes it.
    """

    qk_clip_tau: float = 100.0
    max_loss_ratio: float = 1.5
    checkpoint_minutes: float = 5.0
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole run.

    Attributes:
        name: Name of the recipe.
        model: Architecture.
        schedule: Learning rate and number of updates.
    """

    name: str
    model: ModelConfig
    schedule: CosineSchedule
    init: InitOptions = field(default_factory=InitOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    balancing: BalancingOptions = field(default_factory=BalancingOptions)
    quantization: QuantizationOptions = field(default_factory=QuantizationOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe as JSON values; `parse_recipe` reads it back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def digest(self) -> str:
        """Return the hash of everything that decides the result of a run."""
        content = self.to_dict()
        del content["run"]["checkpoint_minutes"]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def load_recipe(name_or_path: str) -> Recipe:
    """Read a shipped recipe by name, or a TOML file by path.

    Raises:
        ConfigError: Neither exists, the file is not TOML, or a key or value is wrong.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"recipe file {path} does not exist")
        text = path.read_text(encoding="utf-8")
    else:
        folder = resources.files("moonlet.train").joinpath("recipes")
        entry = folder.joinpath(f"{name_or_path}.toml")
        if not entry.is_file():
            names = sorted(x.name[:-5] for x in folder.iterdir() if x.name.endswith(".toml"))
            raise ConfigError(
                f"recipe {name_or_path!r} does not exist; choose one of {', '.join(names)} "
                "or give the path of a .toml file"
            )
        text = entry.read_text(encoding="utf-8")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {name_or_path} is not valid TOML: {error}") from error
    return parse_recipe(table)


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    """Build a recipe from nested tables.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type or range.
    """
    return from_table(Recipe, table, "recipe")
