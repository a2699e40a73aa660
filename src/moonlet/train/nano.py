"""From a recipe to a served model: tokenizer, training, export, evaluation.

    out/tokenizer/     rank file and its configuration, made from the recipe's task mixture
    out/recipe.json    the resolved recipe
    out/metrics.jsonl  one line a step
    out/checkpoints/   the newest two states of the run
    out/model/         the exported checkpoint; once evaluated also card, recipe, evaluation
    out/evaluation.json

Every stage is a function of the recipe and its seeds. Further processes are started fresh and do
data-parallel steps only; the first process does everything else.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from moonlet.chat.bpe import tokenizer_files
from moonlet.chat.tokenizer import Tokenizer
from moonlet.core.errors import CheckpointError, ConfigError, MoonletError
from moonlet.engine.engine import Engine
from moonlet.engine.request import EngineRequest, SamplingParams
from moonlet.kernels.registry import resolve
from moonlet.model.transformer import Transformer
from moonlet.train.card import model_card
from moonlet.train.checkpoint import latest_checkpoint
from moonlet.train.export import export_model
from moonlet.train.metrics import MetricsFile, StepMetrics
from moonlet.train.process_group import Alone, Gloo, ProcessGroup, prepare_process
from moonlet.train.recipe import Recipe, parse_recipe
from moonlet.train.tasks.evaluate import evaluate
from moonlet.train.tasks.heldout import EVAL_SEED
from moonlet.train.tasks.source import TaskSource
from moonlet.train.tasks.tokenizer_corpus import train_ranks
from moonlet.train.trainer import Trainer
from moonlet.weights.checkpoint import load_for_inference

__all__ = [
    "Callbacks",
    "EngineGenerator",
    "RunResult",
    "evaluate_model",
    "make_tokenizer",
    "train",
    "with_seed",
]

MAX_REPLY_TOKENS = 384
EVAL_MAX_SEQS = 32
EVAL_MAX_LEN = 4096
CHILD_EXIT_S = 60


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a caller may watch and decide.

    Attributes:
        on_stage: Called with the name of each stage as it starts.
        on_step: Called after every step.
        should_stop: Asked before every step; True ends the run after it, with a checkpoint.
    """

    on_stage: Callable[[str], None] = lambda name: None
    on_step: Callable[[StepMetrics], None] = lambda metrics: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run ended.

    Attributes:
        is_complete: The whole schedule was trained; else a checkpoint waits to be resumed.
        model: The exported checkpoint.
        report: Evaluation, or None when it was not asked for.
    """

    is_complete: bool
    model: Path
    report: dict[str, Any] | None


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    processes: int = 1,
    max_minutes: float | None = None,
    evaluation_count: int = 200,
    callbacks: Callbacks | None = None,
) -> RunResult:
    """Run a recipe to its end, or to a time limit, and export what it has.

    Args:
        recipe: What to train.
        out: Folder of the run; created when absent.
        resume: Continue from the newest checkpoint in ``out``.
        processes: Data-parallel processes, one thread each; they divide the recipe's shards.
        max_minutes: Wall time of this call's training, or None.
        evaluation_count: Held-out prompts per family; 0 skips the evaluation.
        callbacks: Progress and stopping.

    Raises:
        ConfigError: The folder holds a run and ``resume`` is not set, or values do not fit.
        CheckpointError: There is nothing to resume, or it belongs to another recipe.
    """
    callbacks = callbacks or Callbacks()
    prepare_process()
    checkpoint = _check_folder(out, resume)
    callbacks.on_stage("tokenizer")
    tokenizer = make_tokenizer(recipe, out / "tokenizer")
    (out / "recipe.json").write_text(json.dumps(recipe.to_dict(), indent=1), encoding="utf-8")
    callbacks.on_stage("training")
    trainer, is_complete = _train_parallel(
        recipe, out, tokenizer, checkpoint, processes, max_minutes, callbacks
    )
    callbacks.on_stage("export")
    files = {p.name: p for p in sorted((out / "tokenizer").iterdir())}
    model = export_model(trainer.model, recipe.model, out / "model", files)
    report = None
    if evaluation_count:
        callbacks.on_stage("evaluation")
        report = evaluate_model(model, evaluation_count)
        text = json.dumps(report, indent=1)
        (out / "evaluation.json").write_text(text, encoding="utf-8")
        card = model_card(recipe, model, _last_metrics(out / "metrics.jsonl"), report)
        (model / "README.md").write_text(card, encoding="utf-8")
        for name in ("recipe.json", "evaluation.json"):
            shutil.copyfile(out / name, model / name)
    return RunResult(is_complete, model, report)


def make_tokenizer(recipe: Recipe, folder: Path) -> Tokenizer:
    """Make the tokenizer files of a recipe, or read those that are there.

    Raises:
        ConfigError: The vocabulary does not have the size that the model expects.
    """
    if not folder.is_dir():
        ranks = train_ranks(recipe.data.num_ranks, recipe.data.tokenizer_samples)
        partial = folder.with_name(f".{folder.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        for name, content in tokenizer_files(ranks).items():
            (partial / name).write_bytes(content)
        partial.rename(folder)
    tokenizer = Tokenizer.from_dir(folder)
    if tokenizer.vocab_size != recipe.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {recipe.model.vocab_size} but the tokenizer has "
            f"{tokenizer.vocab_size} ids; data.num_ranks plus 256 reserved ids must match"
        )
    return tokenizer


def _last_metrics(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8").splitlines()[-1])


def evaluate_model(directory: Path, count: int, seed: int = EVAL_SEED) -> dict[str, Any]:
    """Evaluate an exported checkpoint in the engine, greedily.

    Args:
        directory: Exported checkpoint with tokenizer files.
        count: Held-out prompts per family.
        seed: Seed of the prompts.
    """
    tokenizer = Tokenizer.from_dir(directory)
    model = load_for_inference(directory).model
    stop_ids = tokenizer.stop_ids
    with Engine(
        model,
        max_num_seqs=EVAL_MAX_SEQS,
        max_model_len=min(EVAL_MAX_LEN, model.config.max_position_embeddings),
        stop_ids=stop_ids,
    ) as engine:
        return evaluate(EngineGenerator(engine), tokenizer, count, seed)


class EngineGenerator:
    """Greedy continuation through the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the generated ids of each prompt, stop id included."""
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_REPLY_TOKENS)
        handles = []
        for prompt in prompts:
            self._count += 1
            request = EngineRequest(
                request_id=f"evaluation-{self._count}", prompt_ids=prompt, sampling=sampling
            )
            handles.append(self._engine.submit(request))
        return [list(handle.result().ids) for handle in handles]


def _check_folder(out: Path, resume: bool) -> Path | None:
    checkpoint = latest_checkpoint(out / "checkpoints")
    if resume and checkpoint is None:
        raise CheckpointError(f"{out} holds no checkpoint to resume; train without resume first")
    if checkpoint is not None and not resume:
        raise ConfigError(f"{out} holds a run already; resume it or choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    return checkpoint


def _train_parallel(
    recipe: Recipe,
    out: Path,
    tokenizer: Tokenizer,
    checkpoint: Path | None,
    processes: int,
    max_minutes: float | None,
    callbacks: Callbacks,
) -> tuple[Trainer, bool]:
    """Train in this process and ``processes - 1`` further ones."""
    rendezvous = out.resolve() / f".rendezvous-{uuid.uuid4().hex}"
    children = [
        _start_child(rank, processes, rendezvous, recipe, out, checkpoint)
        for rank in range(1, processes)
    ]
    group: ProcessGroup = Gloo(0, processes, rendezvous) if processes > 1 else Alone()
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes

    def should_stop() -> bool:
        is_late = deadline is not None and time.monotonic() >= deadline
        return is_late or callbacks.should_stop()

    try:
        trainer = _build_trainer(recipe, tokenizer, group, checkpoint)
        keep = trainer.step_number if checkpoint is not None else None
        with MetricsFile(out / "metrics.jsonl", keep) as metrics:

            def on_step(step: StepMetrics) -> None:
                metrics.write(step)
                callbacks.on_step(step)

            is_complete = trainer.run(
                on_step, checkpoints=out / "checkpoints", should_stop=should_stop
            )
        _join(children)
    finally:
        for child in children:
            if child.is_alive():
                child.terminate()
        group.close()
        rendezvous.unlink(missing_ok=True)
    return trainer, is_complete


def _build_trainer(
    recipe: Recipe, tokenizer: Tokenizer, group: ProcessGroup, checkpoint: Path | None
) -> Trainer:
    kernels = resolve("cpu", recipe.model, recipe.run.kernels or "auto")
    model = Transformer(recipe.model, kernels)
    trainer = Trainer(recipe, model, TaskSource(tokenizer), group)
    if checkpoint is not None:
        trainer.load(checkpoint)
    return trainer


def _start_child(
    rank: int, processes: int, rendezvous: Path, recipe: Recipe, out: Path, checkpoint: Path | None
) -> BaseProcess:
    context = torch.multiprocessing.get_context("spawn")
    arguments = (rank, processes, rendezvous, recipe.to_dict(), out, checkpoint)
    child = context.Process(target=_run_child, args=arguments, daemon=True)
    child.start()
    return child


def _run_child(
    rank: int,
    processes: int,
    rendezvous: Path,
    recipe_table: dict[str, Any],
    out: Path,
    checkpoint: Path | None,
) -> None:
    """Body of a further process: the same steps, without files."""
    # an interrupt reaches the whole group; the first process decides and votes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_process()
    recipe = parse_recipe(recipe_table)
    group = Gloo(rank, processes, rendezvous)
    trainer = _build_trainer(recipe, Tokenizer.from_dir(out / "tokenizer"), group, checkpoint)
    trainer.run(lambda metrics: None)
    group.close()


def _join(children: list[BaseProcess]) -> None:
    for child in children:
        child.join(CHILD_EXIT_S)
        if child.exitcode != 0:
            raise MoonletError(f"training process {child.pid} ended with {child.exitcode}")


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """Return the recipe with another seed for weights and data."""
    return dataclasses.replace(
        recipe,
        init=dataclasses.replace(recipe.init, seed=seed),
        data=dataclasses.replace(recipe.data, seed=seed),
    )
