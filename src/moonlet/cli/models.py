"""Which checkpoint a command means, and showing how it loads."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

import moonlet
from moonlet.core.errors import ConfigError

__all__ = ["NANO", "load_progress", "model_directory", "served_names"]

NANO = "moonlet-nano"


def model_directory(model: str | None) -> Path:
    """Return the directory of a checkpoint, the bundled one when none is named.

    Raises:
        ConfigError: It does not exist.
    """
    if model is None:
        # an editable install spreads the package over several folders
        for folder in moonlet.__path__:
            bundled = Path(folder) / "assets" / NANO
            if (bundled / "config.json").is_file():
                return bundled
        raise ConfigError(f"this build has no {NANO}; name a checkpoint directory")
    directory = Path(model).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"{model} is no directory; give the folder of a checkpoint (nothing is downloaded)"
        )
    return directory


def served_names(model: str | None, directory: Path) -> tuple[str, ...]:
    """Return the names a server answers to when none are given: folder name, then as written."""
    name = directory.resolve().name
    return (name,) if model in (None, name) else (name, str(model))


@contextmanager
def load_progress(title: str, console: Console) -> Generator[Callable[[int, int], None]]:
    """Show bytes, speed and remaining time of a load; silent where there is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
