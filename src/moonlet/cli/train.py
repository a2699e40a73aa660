"""``moonlet train``: run a recipe with a progress display."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moonlet.core.env import restart_with_huge_heap

if TYPE_CHECKING:
    from moonlet.train.metrics import StepMetrics

__all__ = ["train_command"]

LINE_EVERY = 100


def train_command(
    recipe: str,
    /,
    *,
    out: Path,
    resume: bool = False,
    processes: int = 1,
    max_minutes: float | None = None,
    seed: int | None = None,
    evaluation_count: int = 200,
) -> int:
    """Train a model from a recipe, export and evaluate it.

    Example: `moonlet train nano --out runs/nano --processes 2`

    Parameters
    ----------
    recipe
        Name of a shipped recipe, or the path of a .toml file.
    out
        Folder of the run: tokenizer, metrics, checkpoints, exported model, evaluation.
    resume
        Continue from the newest checkpoint in the folder.
    processes
        Data-parallel processes of one thread each.
    max_minutes
        Stop with a checkpoint after this wall time.
    seed
        Seed of weights and data instead of the recipe's.
    evaluation_count
        Held-out prompts per task family; 0 skips the evaluation.
    """
    restart_with_huge_heap("train")
    from moonlet.train.nano import Callbacks, train, with_seed
    from moonlet.train.recipe import load_recipe

    loaded = load_recipe(recipe)
    if seed is not None:
        loaded = with_seed(loaded, seed)
    console = Console(stderr=True)
    with _interrupt_once() as asked, _Display(console) as display:
        callbacks = Callbacks(display.stage, display.step, lambda: bool(asked))
        result = train(
            loaded,
            out,
            resume=resume,
            processes=processes,
            max_minutes=max_minutes,
            evaluation_count=evaluation_count,
            callbacks=callbacks,
        )
    if not result.is_complete:
        console.print("stopped before the end of the schedule; continue with --resume")
    if result.report is not None:
        _print_report(console, result.report)
    Console().print(str(result.model), soft_wrap=True)
    return 0


@contextmanager
def _interrupt_once() -> Generator[list[int]]:
    """Collect the first interrupt instead of raising it; the second one acts as usual."""
    asked: list[int] = []
    previous = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


class _Display:
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("start", total=None, facts="")

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def stage(self, name: str) -> None:
        """Show which stage runs."""
        self._progress.update(self._task, description=name)
        if not self._console.is_terminal:
            self._console.print(f"stage: {name}")

    def step(self, metrics: StepMetrics) -> None:
        """Show one training step."""
        facts = (
            f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s  "
            f"overload {metrics.max_overload:.2f}"
        )
        self._progress.update(
            self._task, completed=metrics.step, total=metrics.total_steps, facts=facts
        )
        is_line = metrics.step % LINE_EVERY == 0 or metrics.step == metrics.total_steps
        if is_line and not self._console.is_terminal:
            left = metrics.eta_s / 60
            self._console.print(
                f"step {metrics.step}/{metrics.total_steps}  {facts}  {left:.1f} min left",
                soft_wrap=True,
            )


def _print_report(console: Console, report: dict[str, Any]) -> None:
    for family, facts in report["families"].items():
        console.print(f"{family}: {facts['accuracy']:.1%} exact")
    console.print(f"valid markup and stopped: {report['markup']:.1%}")
    lengths = "  ".join(f"{k} {v:.0f}" for k, v in report["reasoning_tokens"].items())
    console.print(f"reasoning tokens: {lengths}")
