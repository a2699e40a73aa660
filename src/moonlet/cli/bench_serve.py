"""``moonlet bench serve``: load on any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from moonlet.bench.load.settings import LoadSettings, check_url
from moonlet.cli.bench_options import write_line, write_table
from moonlet.core.errors import ConfigError

__all__ = ["serve_command"]

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_PERCENTILES = ("p50", "p90", "p95", "p99")
_LATENCIES = ("ttft_s", "itl_s", "e2e_s", "tpot_s", "late_s")


def serve_command(
    url: str,
    /,
    *,
    api_key: str | None = None,
    model_name: str | None = None,
    load: Annotated[LoadSettings, Parameter(name="*", negative="")] = LoadSettings(),  # noqa: B008
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    requests: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Put load on an OpenAI-compatible endpoint and measure its answers.

    Prompts are counted in words, since nobody outside a server knows its tokens; with --tokenizer
    they are counted in tokens. An interrupt gives the report of what was complete.

    Example: `moonlet bench serve http://127.0.0.1:8000/v1 --rate 4 --num-requests 200`

    Parameters
    ----------
    url
        Endpoint up to and including /v1.
    api_key
        Key of the endpoint.
    model_name
        Model to ask for; the endpoint's first one when left out, or those of a replay.
    json_file
        Write every figure and the settings to this file.
    requests
        Write one JSON object per request to this file.
    plot
        Draw the distributions of the latencies to this file (needs matplotlib).
    """
    load = load.resolved()
    check_url(url)
    for flag, path in (("--json", json_file), ("--requests", requests)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} is {path}; its folder does not exist")
    if plot is not None:
        from moonlet.bench.plots import check_plot

        check_plot(plot)
    with _needing_server_extra():
        from moonlet.bench.serve import bench_serve

    if model_name is None and load.replay is None:
        model_name = _first_model(url, api_key)
    with _progress() as on_progress:
        report, records = bench_serve(
            url, model_name, load, api_key=api_key, on_progress=on_progress
        )
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if requests is not None:
        lines = (json.dumps(record.to_json()) + "\n" for record in records)
        requests.write_text("".join(lines), encoding="utf-8")
    if plot is not None:
        from moonlet.bench.plots import plot_serve

        plot_serve(report, records, plot)
    _print(report)
    if report["is_interrupted"]:
        return EXIT_INTERRUPTED
    return 0 if report["requests"]["ok"] else EXIT_FAILED


@contextmanager
def _needing_server_extra() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"bench serve needs {error.name}, which is not installed; pip install 'moonlet[server]'"
        ) from error


def _first_model(url: str, api_key: str | None) -> str:
    from moonlet.cli.openai_client import ChatClient, ChatOptions

    with ChatClient(url, api_key, None, ChatOptions()) as client:
        return client.model


@contextmanager
def _progress() -> Generator[Any]:
    """Show how far the run is on a terminal's stderr.

    A spinner would redraw from a thread of its own, in the middle of what is timed.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    yield lambda text: sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.write("\r\x1b[K")


def _print(report: dict[str, Any]) -> None:
    requests, rate = report["requests"], report["requests_per_s"]
    write_line(f"{report['url']}, {report['model'] or 'models as recorded'}: {_load(report)}")
    write_table(
        ("ms", "count", "mean", *_PERCENTILES),
        [_cells(name, report[name]) for name in _LATENCIES if report[name] is not None],
    )
    write_line(
        f"requests: {requests['sent']} sent in {report['elapsed_s']:.2f} s, {requests['ok']} ok "
        f"({rate:.2f}/s), {requests['refused']} refused (429), {requests['failed']} failed"
    )
    for problem, count in report["failures"].items():
        write_line(f"failed: {count} x {problem}")
    for name, words in (
        ("interrupted_requests", "requests cut short by the interrupt"),
        ("unsent_turns", "turns not sent, since one before them found no success"),
        ("without_usage", "answers without usage; their tokens are missing below"),
    ):
        if report[name]:
            write_line(f"{report[name]} {words}")
    for name in ("prompt", "completion"):
        count, per_s = report[f"{name}_tokens"], report[f"{name}_tokens_per_s"]
        write_line(f"{name} tokens: {count} ({per_s:.1f}/s)")
    _print_findings(report)


def _print_findings(report: dict[str, Any]) -> None:
    cache, goodput, limit = report["cache"], report["goodput"], report["limit"]
    if cache is None:
        write_line("cache: the endpoint reports no cached tokens")
    else:
        write_line(
            f"cache: {cache['cached_tokens']} of {cache['prompt_tokens']} prompt tokens, "
            f"{100 * cache['share']:.1f} %"
        )
    if goodput is not None:
        write_line(
            f"goodput: {goodput['requests']} requests, {100 * goodput['share']:.1f} %, "
            f"{goodput['requests_per_s']:.2f}/s ({_objectives(report['settings'])})"
        )
    refused = limit["first_refused_in_flight"]
    end = "no 429" if refused is None else f"first 429 with {refused} in flight"
    write_line(f"limit: {limit['accepted_in_flight']} in flight were all accepted, {end}")


def _load(report: dict[str, Any]) -> str:
    settings = report["settings"]
    if settings["replay"] is not None:
        return f"replay of {settings['replay']} at {settings['speed']:g} times its speed"
    if settings["rate"] is not None:
        when = f"{settings['rate']:g} starts per second"
    else:
        when = f"{settings['concurrency']} at once"
    return f"{settings['workload']}, {when}, lengths in {report['length_unit']}"


def _objectives(settings: dict[str, Any]) -> str:
    named = (("TTFT", settings["slo_ttft_ms"]), ("mean ITL", settings["slo_itl_ms"]))
    return ", ".join(f"{name} <= {value:g} ms" for name, value in named if value is not None)


def _cells(name: str, found: dict[str, float]) -> tuple[str, ...]:
    values = (f"{1e3 * found[key]:.2f}" for key in ("mean", *_PERCENTILES))
    shown = {"late_s": "late start"}.get(name, name.removesuffix("_s").upper())
    return (shown, str(found["count"]), *values)
