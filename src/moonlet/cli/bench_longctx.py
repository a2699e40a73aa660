"""``moonlet bench longctx``: decode at long contexts, against an all-MLA twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moonlet.cli.bench_options import (
    AsJson,
    Counts,
    bounds_line,
    prepare,
    progress,
    write_json,
    write_line,
    write_table,
)
from moonlet.cli.models import model_directory
from moonlet.core.errors import ConfigError

__all__ = ["longctx_command"]

GIB = 1 << 30


def longctx_command(
    model: str | None = None,
    /,
    *,
    context: Counts = (65536,),
    scale: str | None = None,
    repeats: int = 3,
    threads: int = 1,
    memory_gib: int = 16,
    plot: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Measure decode steps at long contexts, against a twin whose layers are all MLA.

    Only the configuration of MODEL is read; weights and state are random.

    Example: `moonlet bench longctx --scale k3-quarter --context 65536,262144`

    Parameters
    ----------
    model
        Checkpoint directory; the bundled one when absent.
    context
        Lengths of the sequence.
    scale
        Architecture by name instead of a directory: k3-quarter or nano.
    repeats
        Timed steps per network and context, interleaved; the median is reported.
    threads
        Threads of the operators.
    memory_gib
        What weights and state may take.
    plot
        Draw the time of a step against the context to this file (needs matplotlib).
    as_json
        Print one JSON object instead of a table.
    """
    if model is not None and scale is not None:
        raise ConfigError("MODEL and --scale both name an architecture; give one of them")
    directory = model_directory(model)
    prepare(threads, plot)
    from moonlet.bench.longctx import bench_longctx
    from moonlet.bench.scales import scale_config

    with progress() as on_progress:
        report = bench_longctx(
            *scale_config(scale, directory),
            contexts=context,
            repeats=repeats,
            memory_bytes=memory_gib * GIB,
            on_progress=on_progress,
        )
    if plot is not None:
        from moonlet.bench.plots import plot_longctx

        plot_longctx(report, plot)
    if as_json:
        write_json(report)
    else:
        _print(report)
    return 0


def _print(report: dict[str, Any]) -> None:
    write_line(
        f"{report['architecture']}, {report['layers']} layers, {report['kda_layers']} of them KDA "
        f"(none in the twin), {bounds_line(report)}"
    )
    rows = [
        (str(row["context"]), name, *_cells(row[name]), f"{row['twin_over_model']:.2f}")
        for row in report["results"]
        for name in ("model", "twin")
    ]
    names = ("context", "network", "ms/step", "bound ms", "by", "ratio", "GB/s", "GFLOP/s")
    write_table((*names, "twin/model"), rows)


def _cells(step: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{1e3 * step['step_s']:.2f}",
        f"{1e3 * step['bound_s']:.2f}",
        step["bound_by"],
        f"{step['ratio']:.3f}",
        f"{step['bytes_per_s'] / 1e9:.2f}",
        f"{step['flops_per_s'] / 1e9:.2f}",
    )
