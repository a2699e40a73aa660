"""What the commands of ``moonlet bench`` share: flags, preparation, output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token
from rich.console import Console

from moonlet.cli.serve_flags import check_threads
from moonlet.core.env import bound_threads

__all__ = [
    "AsJson",
    "Counts",
    "bounds_line",
    "prepare",
    "progress",
    "write_json",
    "write_line",
    "write_table",
]


def _counts(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    return tuple(int(value) for token in tokens for value in token.value.split(","))


Counts = Annotated[tuple[int, ...], Parameter(converter=_counts, negative="")]
"""Whole numbers: ``--rows 1,4`` and ``--rows 1 --rows 4`` mean the same."""

AsJson = Annotated[bool, Parameter(name="--json", negative="")]


def prepare(threads: int, plot: Path | None) -> None:
    """Check what can be checked before measuring, and bound the threads.

    Raises:
        ConfigError: A number of threads below one, or a plot that could not be written.
    """
    check_threads(threads)
    bound_threads(threads)
    if plot is not None:
        from moonlet.bench.plots import check_plot

        check_plot(plot)
    import torch

    torch.set_num_threads(threads)


@contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Show on a terminal's stderr what is being measured."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update


def write_json(report: dict[str, Any]) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


def write_line(text: str) -> None:
    """Print a line of whatever length."""
    sys.stdout.write(text + "\n")


def write_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their cells, in a pipe too; numbers to the right."""
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    widths = [max(map(len, (name, *cells))) for name, cells in zip(names, columns, strict=True)]
    is_number = [all(cell[:1].isdecimal() for cell in cells) for cells in columns]
    for row in (names, *rows):
        cells = zip(row, widths, is_number, strict=True)
        line = "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells)
        write_line(line.rstrip())


def bounds_line(report: dict[str, Any]) -> str:
    """Return the setting and the measured bounds in words."""
    before, after = report["load_average"]
    return (
        f"{report['threads']} thread(s), {report['isa_level'] or 'no native kernels'}, "
        f"read {report['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"multiply-add {report['fma_flops_per_s'] / 1e9:.1f} GFLOP/s ({report['probe']} probe, "
        f"median of {report['probe_samples']}), load {before:.2f} to {after:.2f}"
    )
