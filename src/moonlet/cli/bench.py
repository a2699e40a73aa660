"""``moonlet bench``: measurements with their hardware bound."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from moonlet.cli.models import model_directory
from moonlet.cli.serve_flags import check_threads
from moonlet.core.env import bound_threads

__all__ = ["bench_app"]

bench_app = App(name="bench", help="Measure speed against the bound of this machine.")


@bench_app.command(name="engine")
def engine_command(
    model: str | None = None,
    /,
    *,
    streams: tuple[int, ...] = (1, 8),
    prompt_len: int = 32,
    output_len: int = 128,
    repeats: int = 3,
    threads: int = 1,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Measure decode speed at several numbers of concurrent streams.

    Example: `moonlet bench engine --streams 1 --streams 8`

    Parameters
    ----------
    model
        Checkpoint directory; the bundled one when absent.
    streams
        Numbers of concurrent requests.
    prompt_len
        Tokens of every prompt.
    output_len
        Tokens generated per request.
    repeats
        Runs per number of streams, interleaved; the median is reported.
    threads
        Threads of the operators.
    as_json
        Print one JSON object instead of a table.
    """
    check_threads(threads)
    bound_threads(threads)
    import torch

    from moonlet.bench.engine import bench_engine

    directory = model_directory(model)
    torch.set_num_threads(threads)
    report = bench_engine(
        directory,
        streams=streams,
        prompt_len=prompt_len,
        output_len=output_len,
        repeats=repeats,
    )
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report)
    return 0


def _print(report: dict[str, Any]) -> None:
    table = Table(
        title=f"{report['checkpoint']}, {report['dtype']}, {report['threads']} thread(s), "
        f"read {report['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"load {report['load_average']:.2f}"
    )
    for name in ("streams", "tokens/s", "bound tokens/s", "ratio", "forward calls"):
        table.add_column(name, justify="right")
    for row in report["results"]:
        table.add_row(
            str(row["streams"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['bound_tokens_per_s']:.1f}",
            f"{row['ratio']:.3f}",
            str(row["forward_calls"]),
        )
    Console().print(table)
