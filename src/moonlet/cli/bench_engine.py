"""``moonlet bench engine``: decode and prefill speed of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from moonlet.cli.bench_options import (
    AsJson,
    Counts,
    bounds_line,
    prepare,
    write_json,
    write_line,
    write_table,
)
from moonlet.cli.models import model_directory
from moonlet.core.units import format_bytes

__all__ = ["engine_command"]


def engine_command(
    model: str | None = None,
    /,
    *,
    streams: Counts = (1, 8),
    prompt_len: int = 32,
    output_len: int = 128,
    prefill: Counts = (),
    repeats: int = 3,
    moe_activation: Literal["bf16", "mxfp8", "mxfp8-floor", "int8"] = "bf16",
    trunk: Literal["stored", "int8"] = "stored",
    trunk_activation: Literal["bf16", "int8"] = "bf16",
    threads: int = 1,
    plot: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Measure decode speed at several numbers of concurrent streams, and prefill speed.

    Example: `moonlet bench engine --streams 1,4,8,16 --prefill 512`

    Parameters
    ----------
    model
        Checkpoint directory; the bundled one when absent.
    streams
        Numbers of concurrent requests.
    prompt_len
        Tokens of every prompt of the decode runs.
    output_len
        Tokens generated per request.
    prefill
        Prompt lengths of the prefill runs; logits are computed for the last row only.
    repeats
        Runs per number of streams and prompt length, interleaved; the median is reported.
    moe_activation
        Rounding of the routed experts' inputs: none (bf16), MXFP8 groups with ceil or floor
        scales, or int8 groups.
    trunk
        Matrices outside the routed experts: as stored, or int8 with a scale per row.
    trunk_activation
        Rounding of the inputs of an int8 trunk: none (bf16), or int8 groups.
    threads
        Threads of the operators.
    plot
        Draw the speeds and their bounds to this file (needs matplotlib).
    as_json
        Print one JSON object instead of tables.
    """
    directory = model_directory(model)
    prepare(threads, plot)
    from moonlet.bench.engine import bench_engine

    report = bench_engine(
        directory,
        streams=streams,
        prompt_len=prompt_len,
        output_len=output_len,
        prefill=prefill,
        repeats=repeats,
        moe_activation=moe_activation,
        trunk=trunk,
        trunk_activation=trunk_activation,
    )
    if plot is not None:
        from moonlet.bench.plots import plot_engine

        plot_engine(report, plot)
    if as_json:
        write_json(report)
    else:
        _print(report)
    return 0


def _print(report: dict[str, Any]) -> None:
    write_line(f"{report['checkpoint']}, {report['dtype']}, {bounds_line(report)}")
    grown = report["rss_bytes"] - report["rss_before_load_bytes"]
    write_line(
        f"resident {format_bytes(report['rss_bytes'])}, of it {format_bytes(grown)} since before "
        f"loading; weights {format_bytes(report['weight_bytes'])}"
    )
    stored = report["weight_bytes_by_dtype"].items()
    write_line(
        f"trunk {report['trunk']}, its inputs {report['trunk_activation']}, "
        f"experts' inputs {report['moe_activation']}, weights as "
        + ", ".join(f"{dtype} {format_bytes(count)}" for dtype, count in stored)
    )
    decode = ("tokens/s", "bound", "ratio", "ms/step", "GB/s", "GFLOP/s", "GFLOP/token", "AttnRes")
    write_table(
        ("streams", *decode),
        [
            (
                str(row["streams"]),
                *_speeds(row),
                f"{1e3 * row['step_s']:.2f}",
                f"{row['bytes_per_s'] / 1e9:.2f}",
                *_work(row),
            )
            for row in report["results"]
        ],
    )
    prefill = ("tokens/s", "bound", "ratio", "ms", "GFLOP/s", "GFLOP/token", "AttnRes")
    rows = [
        (str(row["prompt_tokens"]), *_speeds(row), f"{1e3 * row['wall_s']:.1f}", *_work(row))
        for row in report["prefill"]
    ]
    if rows:
        write_table(("prompt", *prefill), rows)


def _speeds(row: dict[str, Any]) -> tuple[str, ...]:
    """Measured speed, bound and fraction."""
    return (
        f"{row['tokens_per_s']:.1f}",
        f"{row['bound_tokens_per_s']:.1f}",
        f"{row['ratio']:.3f}",
    )


def _work(row: dict[str, Any]) -> tuple[str, ...]:
    """Rate, work per token and the share of AttnRes."""
    return (
        f"{row['flops_per_s'] / 1e9:.2f}",
        f"{row['gflop_per_token']:.4f}",
        f"{row['attn_res_share']:.1%}",
    )
