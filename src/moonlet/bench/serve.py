"""Load on an OpenAI-compatible endpoint: what it answers, how fast, and where it refuses.

Everything runs in one event loop of this process; how late it started requests is part of the
report, so a reader can tell the endpoint's delays from those of the generator.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from moonlet.bench.load.client import LoadClient
from moonlet.bench.load.record import RequestRecord
from moonlet.bench.load.replay import read_log
from moonlet.bench.load.report import make_report
from moonlet.bench.load.runner import LoadRun
from moonlet.bench.load.sessions import make_sessions, poisson, replayed
from moonlet.bench.load.settings import LoadSettings, check_url
from moonlet.bench.load.text import TextSource

__all__ = ["LoadResult", "bench_serve"]

_TICK_S = 1.0


class LoadResult(NamedTuple):
    """The report of a run, and the records that it was made from."""

    report: dict[str, Any]
    records: list[RequestRecord]


def bench_serve(
    base_url: str,
    model: str | None,
    settings: LoadSettings,
    *,
    api_key: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> LoadResult:
    """Put load on an endpoint and measure its answers.

    An interrupt (SIGINT) ends the run; the report then has what was complete.

    Args:
        base_url: Up to and including ``/v1``.
        model: Name to ask for; None leaves the names of a replay as recorded.
        settings: What is sent when.
        api_key: Sent as bearer token.
        on_progress: Told once a second how far the run is.

    Returns:
        JSON values: the settings, and the figures of `make_report`; and the records.

    Raises:
        ConfigError: The URL is none, a setting is out of range or without effect, or the log
            is malformed.
        CheckpointError: There is no vocabulary where the settings name one.
    """
    check_url(base_url)
    settings = settings.resolved()
    source = TextSource(settings.tokenizer)
    run = asyncio.run(_run(base_url, model, settings, source, api_key, on_progress))
    report = {
        "url": base_url,
        "model": model,
        "settings": settings.to_json(),
        "length_unit": source.unit if settings.replay is None else None,
        "is_interrupted": run.is_stopped,
        "interrupted_requests": run.interrupted,
        "unsent_turns": run.unsent_turns,
        **make_report(
            run.records,
            run.elapsed_s,
            slo_ttft_s=_seconds(settings.slo_ttft_ms),
            slo_itl_s=_seconds(settings.slo_itl_ms),
        ),
    }
    return LoadResult(report, run.records)


async def _run(
    base_url: str,
    model: str | None,
    settings: LoadSettings,
    source: TextSource,
    api_key: str | None,
    on_progress: Callable[[str], None],
) -> LoadRun:
    loop = asyncio.get_running_loop()
    fields = settings.extra_fields if model is None else {"model": model, **settings.extra_fields}
    log = [] if settings.replay is None else read_log(settings.replay, settings.speed or 1.0)
    async with LoadClient(base_url, api_key, settings.timeout, loop.time) as client:
        run = LoadRun(
            client.send,
            loop.time,
            num_requests=settings.num_requests,
            duration_s=settings.duration,
            retries=settings.retries,
        )
        ticker = asyncio.create_task(_tick(run, on_progress))
        with _on_interrupt(lambda: loop.call_soon_threadsafe(run.stop)):
            if log:
                await run.open_loop(replayed(log, fields))
            else:
                sessions = make_sessions(settings, source, fields)
                if settings.rate is not None:
                    await run.open_loop(poisson(sessions, settings.rate, settings.seed))
                else:
                    await run.closed_loop(sessions, settings.concurrency or 1)
        ticker.cancel()
    return run


async def _tick(run: LoadRun, on_progress: Callable[[str], None]) -> None:
    while True:
        on_progress(f"{len(run.records)} requests ended, {run.in_flight} in flight")
        await asyncio.sleep(_TICK_S)


@contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Generator[None]:
    """Let the first SIGINT stop the run instead of the process; a second one does its usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
