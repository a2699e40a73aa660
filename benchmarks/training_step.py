"""Speed of one training step on one core: forward and backward, and the optimizer.

    OMP_NUM_THREADS=1 python benchmarks/training_step.py [RECIPE] > result.json

Runs a recipe's model on synthetic documents of 100 to 450 tokens, once with the recipe's operators
and once with the automatic choice. Times are processor seconds, which a busy neighbour disturbs
less than wall time; the best of the timed steps counts.
"""

import dataclasses
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from moonlet.kernels.registry import resolve
from moonlet.model.transformer import Transformer
from moonlet.train.process_group import prepare_process
from moonlet.train.recipe import Recipe, load_recipe
from moonlet.train.trainer import Trainer

TOKENS = 4096
NUM_STEPS = 6


def sample(seed: int, index: int, progress: float) -> tuple[list[int], list[bool]]:
    """Return a document whose second half is supervised."""
    rng = random.Random(f"{seed}:{index}")
    length = rng.randint(100, 450)
    ids = [rng.randrange(256) for _ in range(length)]
    return ids, [position > length // 2 for position in range(length)]


def measure(recipe: Recipe, kernels: dict[str, str] | str) -> dict[str, Any]:
    """Return tokens per processor second and seconds of the parts of a step."""
    model = Transformer(recipe.model, resolve("cpu", recipe.model, kernels))
    trainer = Trainer(recipe, model, sample)
    update_s = [timed(lambda: trainer.optimizer.step(1e-4)) for _ in range(3)]
    step_s, tokens = [], []
    for _ in range(NUM_STEPS):
        start = time.process_time()
        metrics, _ = trainer.step()
        step_s.append(time.process_time() - start)
        tokens.append(metrics.tokens)
    best = max(range(NUM_STEPS), key=lambda i: tokens[i] / step_s[i])
    return {
        "tokens": tokens[best],
        "step_cpu_s": round(step_s[best], 3),
        "optimizer_cpu_s": round(min(update_s), 3),
        "optimizer_share": round(min(update_s) / step_s[best], 3),
        "tokens_per_cpu_s": round(tokens[best] / step_s[best]),
    }


def timed(call: Callable[[], None]) -> float:
    """Return the processor seconds of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main(name: str) -> None:
    """Measure and write one JSON object to stdout."""
    prepare_process()
    recipe = load_recipe(name)
    data = dataclasses.replace(recipe.data, num_shards=1, tokens_per_step=TOKENS)
    recipe = dataclasses.replace(recipe, data=data)
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "recipe": name,
        "recipe_operators": measure(recipe, recipe.run.kernels),
        "automatic_operators": measure(recipe, "auto"),
    }
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "nano")
