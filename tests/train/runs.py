"""A tiny training run: recipe, sample source and trainer."""

import dataclasses
import random
from typing import Any

from moonlet.core.config import ModelConfig
from moonlet.model.transformer import Transformer
from moonlet.testing.tiny import tiny_config
from moonlet.train.init import InitOptions
from moonlet.train.process_group import ProcessGroup
from moonlet.train.recipe import DataOptions, Recipe
from moonlet.train.schedule import CosineSchedule
from moonlet.train.trainer import Trainer


def copying(seed: int, index: int, progress: float) -> tuple[list[int], list[bool]]:
    """Random letters, a separator, the letters again; the second half is supervised."""
    rng = random.Random(f"{seed}:{index}")
    letters = [rng.randrange(97, 105) for _ in range(rng.randint(3, 9))]
    ids = [*letters, 10, *letters, 258]
    return ids, [False] * (len(letters) + 1) + [True] * (len(letters) + 1)


def tiny_recipe(config: ModelConfig | None = None, **sections: Any) -> Recipe:
    base = Recipe(
        name="tiny",
        model=tiny_config() if config is None else config,
        schedule=CosineSchedule(peak_lr=5e-3, total_steps=8, warmup_fraction=0.1),
        init=InitOptions(projection_gain=0.5, seed=3),
        data=DataOptions(tokens_per_step=128, num_shards=2, seed=5),
    )
    return dataclasses.replace(base, **sections)


def tiny_trainer(recipe: Recipe | None = None, group: ProcessGroup | None = None) -> Trainer:
    recipe = recipe or tiny_recipe()
    return Trainer(recipe, Transformer(recipe.model), copying, group)
