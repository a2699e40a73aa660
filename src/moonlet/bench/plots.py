"""Plots of the reports, with matplotlib where it is installed (extra ``report``)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonlet.core.errors import ConfigError

if TYPE_CHECKING:
    from moonlet.bench.load.record import RequestRecord

__all__ = ["check_plot", "plot_engine", "plot_kernels", "plot_longctx", "plot_serve"]

COLUMNS = 3


def check_plot(path: Path) -> None:
    """Check that a plot can be written, before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed, the folder does not exist, or the suffix names
            no format.
    """
    formats = _figure().canvas.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".")
    if suffix not in formats:
        raise ConfigError(f"--plot is {path}; end it in one of {', '.join(sorted(formats))}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot is {path}; its folder does not exist")


def _figure(**options: Any) -> Any:
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; pip install 'moonlet[report]'"
        ) from error
    return module.Figure(layout="constrained", **options)


def plot_kernels(report: dict[str, Any], path: Path) -> None:
    """Draw the fraction of the bound against the rows, one panel per operator."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in report["results"]:
        after = "" if row["context"] is None else f"after {row['context']}"
        label = " ".join(filter(None, (row["backend"], row["case"], after)))
        lines = panels.setdefault(row["op"], {})
        lines.setdefault(label, []).append((row["rows"], row["ratio"]))
    height = -(-len(panels) // COLUMNS)
    figure = _figure(figsize=(4 * COLUMNS, 3 * max(1, height)))
    for number, (op, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(height, COLUMNS, number)
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.axhline(1.0, color="grey", linestyle="--")
        axes.set(title=op, xlabel="rows", ylabel="fraction of the bound", xscale="log")
        axes.legend(fontsize="small")
    figure.suptitle(f"{report['shape']}, {_setting(report)}")
    figure.savefig(path)


def plot_engine(report: dict[str, Any], path: Path) -> None:
    """Draw decode and, where measured, prefill speed with their bounds."""
    panels: list[tuple[str, str, Sequence[dict[str, Any]]]] = [
        ("decode", "streams", report["results"])
    ]
    if report["prefill"]:
        panels.append(("prefill", "prompt_tokens", report["prefill"]))
    figure = _figure(figsize=(5 * len(panels), 4))
    for number, (title, key, rows) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for value, style in (("tokens_per_s", "-"), ("bound_tokens_per_s", "--")):
            points = [(row[key], row[value]) for row in rows]
            label = value.removesuffix("_tokens_per_s").replace("tokens_per_s", "measured")
            axes.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=label)
        axes.set(title=title, xlabel=key.replace("_", " "), ylabel="tokens/s", yscale="log")
        axes.legend()
    figure.suptitle(f"{report['checkpoint']}, {_setting(report)}")
    figure.savefig(path)


def plot_longctx(report: dict[str, Any], path: Path) -> None:
    """Draw the time of a step of both networks against the context, with their bounds."""
    figure = _figure(figsize=(6, 4))
    axes = figure.add_subplot()
    contexts = [row["context"] for row in report["results"]]
    for network, color in (("model", "C0"), ("twin", "C1")):
        rows = [row[network] for row in report["results"]]
        measured = [1e3 * row["step_s"] for row in rows]
        bound = [1e3 * row["bound_s"] for row in rows]
        axes.plot(contexts, measured, marker="o", color=color, label=network)
        axes.plot(contexts, bound, linestyle="--", color=color, label=f"bound of the {network}")
    axes.set(xlabel="context", ylabel="ms per step", xscale="log", yscale="log")
    axes.legend()
    figure.suptitle(f"{report['architecture']}, {_setting(report)}")
    figure.savefig(path)


def plot_serve(report: dict[str, Any], records: Sequence[RequestRecord], path: Path) -> None:
    """Draw the shares of requests within a latency, and each request's latency over the run."""
    good = [record for record in records if record.outcome == "ok"]
    panels = {
        "ttft_s": [r.ttft_s for r in good if r.ttft_s is not None],
        "itl_s": [gap for r in good for gap in r.itl_s],
        "e2e_s": [r.e2e_s for r in good],
    }
    figure = _figure(figsize=(4 * len(panels), 7))
    placed = figure.subplot_mosaic([list(panels), ["run"] * len(panels)])
    for name, values in panels.items():
        axes = placed[name]
        title = name.removesuffix("_s").upper()
        axes.set(title=title, xlabel="ms", ylabel="share at most as long")
        if values:
            axes.ecdf([1e3 * value for value in values])
            for key, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
                at_ms = 1e3 * report[name][key]
                axes.axvline(at_ms, color="grey", linestyle=style, label=f"{key} {at_ms:.1f}")
            axes.legend(fontsize="small")
    axes = placed["run"]
    for outcome, mark in (("ok", "."), ("refused", "x"), ("failed", "v")):
        points = [(r.sent_s, 1e3 * r.e2e_s) for r in records if r.outcome == outcome]
        if points:
            axes.plot(*zip(*points, strict=True), mark, label=f"{outcome} {len(points)}")
    axes.set(xlabel="sent after s", ylabel="ms to the end")
    axes.set_ylim(bottom=0)
    if records:
        axes.legend(fontsize="small")
    figure.suptitle(f"{report['url']}, {report['model'] or 'models as recorded'}")
    figure.savefig(path)


def _setting(report: dict[str, Any]) -> str:
    return (
        f"{report['threads']} thread(s), "
        f"read {report['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"multiply-add {report['fma_flops_per_s'] / 1e9:.0f} GFLOP/s"
    )
