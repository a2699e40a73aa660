"""``moonlet bench kernels``: speed of every operator, and whether backends agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

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

__all__ = ["kernels_command"]

Names = tuple[str, ...]
MIB = 1 << 20


def kernels_command(
    *,
    op: Annotated[Names, Parameter(negative="")] = (),
    backend: Annotated[Names, Parameter(negative="")] = (),
    shape_of: str | None = None,
    scale: str | None = None,
    rows: Counts = (1, 4, 8, 16, 512),
    context: Counts = (),
    repeats: int = 5,
    working_set_mib: int | None = None,
    threads: int = 1,
    check: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    plot: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Measure every operator and backend, or compare backends with the reference.

    Example: `moonlet bench kernels --op linear --rows 1,8 --scale nano`

    Parameters
    ----------
    op
        Operators to run; all when absent.
    backend
        Backends to run; all that can serve when absent.
    shape_of
        Checkpoint directory whose shapes are used.
    scale
        Shapes by name: k3-quarter (the default) or nano.
    rows
        Rows of the batch; decode operators take at most 64. Not used by --check.
    context
        Rows before, of mla_decode, mla_prefill and kda_step (1024 when absent); rows of kda_chunk
        in place of --rows. Long ones are for native backends: name --op and --backend too.
    repeats
        Timed samples per case and backend, interleaved; with --check, random shapes per operator.
    working_set_mib
        What copies of the arguments must exceed so that no cache serves them; twice the largest
        cache when absent.
    threads
        Threads of the operators.
    check
        Compare results on random shapes instead of measuring; exit code 1 when one is wrong.
    seed
        Where the random numbers of --check start.
    plot
        Draw the fraction of the bound per operator to this file (needs matplotlib).
    as_json
        Print one JSON object instead of a table.
    """
    if shape_of is not None and scale is not None:
        raise ConfigError("--shape-of and --scale both name shapes; give one of them")
    if check and (shape_of or scale or plot or context):
        flags = "--shape-of, --scale, --context and --plot"
        raise ConfigError(f"--check draws random shapes; drop {flags}")
    directory = model_directory(shape_of)
    named = "k3-quarter" if scale is None and shape_of is None else scale
    prepare(threads, plot)
    chosen: dict[str, Any] = {"ops": op, "backends": backend}
    if check:
        report = _check(num_shapes=repeats, seed=seed, **chosen)
    else:
        set_bytes = None if working_set_mib is None else working_set_mib * MIB
        limits = {"repeats": repeats, "working_set_bytes": set_bytes}
        sizes = {"rows": rows, "contexts": context}
        report = _speed(directory, named, plot, **chosen, **sizes, **limits)
    if as_json:
        write_json(report)
    else:
        (_print_check if check else _print_speed)(report)
    return 0 if report.get("ok", True) else 1


def _check(**options: Any) -> dict[str, Any]:
    from moonlet.bench.check import check_kernels

    with progress() as on_progress:
        return check_kernels(**options, on_progress=on_progress)


def _speed(directory: Path, scale: str | None, plot: Path | None, **options: Any) -> dict[str, Any]:
    from moonlet.bench.kernels import bench_kernels
    from moonlet.bench.plots import plot_kernels
    from moonlet.bench.scales import scale_config

    with progress() as on_progress:
        report = bench_kernels(*scale_config(scale, directory), **options, on_progress=on_progress)
    if plot is not None:
        plot_kernels(report, plot)
    return report


def _print_speed(report: dict[str, Any]) -> None:
    write_line(f"shapes of {report['shape']}, {bounds_line(report)}")
    write_table(
        (
            *("operator", "case", "rows", "after", "backend", "us", "us/row", "GB/s", "GFLOP/s"),
            *("MFLOP/row", "bound us", "by", "ratio", "from"),
        ),
        [
            (
                row["op"],
                row["case"],
                str(row["rows"]),
                "" if row["context"] is None else str(row["context"]),
                row["backend"],
                f"{1e6 * row['seconds']:.1f}",
                f"{1e6 * row['seconds'] / row['rows']:.2f}",
                f"{row['bytes_per_s'] / 1e9:.2f}",
                f"{row['flops_per_s'] / 1e9:.2f}",
                f"{row['flops'] / row['rows'] / 1e6:.3f}",
                f"{1e6 * row['bound_s']:.1f}",
                row["bound_by"],
                f"{row['ratio']:.3f}",
                "memory" if row["is_cold"] else "cache",
            )
            for row in report["results"]
        ],
    )
    for refusal in report["refused"]:
        write_line(f"{refusal['op']}: {refusal['backend']} refuses: {refusal['reason']}")


def _print_check(report: dict[str, Any]) -> None:
    write_line(
        f"{report['shapes']} random shapes per operator from seed {report['seed']}, "
        f"{report['threads']} thread(s), {report['isa_level'] or 'no native kernels'}"
    )
    write_table(
        ("operator", "backend", "cases", "refused", "worst error ratio", "at most", "verdict"),
        [
            (
                row["op"],
                row["backend"],
                str(row["cases"]),
                str(row["refused"]),
                "infinite" if row["worst_ratio"] is None else f"{row['worst_ratio']:.1e}",
                f"{row['tolerance']:.0e}",
                "ok" if row["ok"] else "WRONG",
            )
            for row in report["results"]
        ],
    )
    for row in report["results"]:
        if row["failure"]:
            write_line(f"{row['op']}: {row['backend']}: {row['failure']}")
