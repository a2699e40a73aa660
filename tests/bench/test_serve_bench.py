import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonlet.bench.load.settings import LoadSettings
from moonlet.bench.plots import plot_serve
from moonlet.bench.serve import bench_serve
from tests.bench.load_command import FEW, Bench, refusal
from tests.bench.load_server import Exchange, always, delta, load_server, stream_of


def refusing_above(places: int) -> Callable[[Exchange], Any]:
    """An endpoint that holds what it has accepted until it has refused something."""
    busy: set[int] = set()
    is_full = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if len(busy) == places:
            is_full.set()
            await exchange.refuse(retry_after="0")
            return
        busy.add(exchange.number)
        await is_full.wait()
        await always(exchange)
        busy.remove(exchange.number)

    return script


# ---- the whole command --------------------------------------------------------------------------


def test_a_report_has_every_figure_and_the_settings(bench: Bench) -> None:
    with load_server() as server:
        done = bench(server, "--num-requests", "5", "--slo-ttft-ms", "1e9")
    assert done.code == 0
    report = done.report
    assert report["url"] == server.url
    assert report["model"] == "first-model"
    assert report["length_unit"] == "words"
    assert report["settings"]["num_requests"] == 5
    assert report["settings"]["concurrency"] == 1
    assert report["requests"] == {"sent": 5, "ok": 5, "refused": 0, "failed": 0}
    assert (report["is_interrupted"], report["interrupted_requests"]) == (False, 0)
    assert report["ttft_s"]["count"] == report["e2e_s"]["count"] == report["tpot_s"]["count"] == 5
    assert report["itl_s"]["count"] == 10
    assert report["late_s"] is None
    assert (report["prompt_tokens"], report["completion_tokens"]) == (500, 15)
    assert report["cache"] == {"cached_tokens": 320, "prompt_tokens": 500, "share": 0.64}
    assert report["goodput"]["share"] == 1.0
    assert report["limit"]["accepted_in_flight"] == 1
    assert [len(record["itl_s"]) for record in done.records] == [2] * 5
    assert server.listed == 1
    assert {body["model"] for body in server.bodies} == {"first-model"}


def test_the_table_says_what_the_report_says(bench: Bench) -> None:
    with load_server() as server:
        done = bench(server, "--num-requests", "4", "--rate", "5000", "--slo-itl-ms", "1e9")
    head, names, *rows = done.printed.splitlines()
    assert head == f"{server.url}, first-model: random, 5000 starts per second, lengths in words"
    assert names.split() == ["ms", "count", "mean", "p50", "p90", "p95", "p99"]
    shown = {row.rsplit(None, 6)[0].strip(): row.rsplit(None, 6)[1:] for row in rows[:5]}
    assert list(shown) == ["TTFT", "ITL", "E2E", "TPOT", "late start"]
    for label, key in (("TTFT", "ttft_s"), ("late start", "late_s")):
        found = done.report[key]
        keys = ("mean", "p50", "p90", "p95", "p99")
        assert shown[label] == [str(found["count"]), *(f"{1e3 * found[k]:.2f}" for k in keys)]
    text = "\n".join(rows[5:])
    assert "4 ok" in text
    assert "prompt tokens: 400 " in text
    assert "cache: 256 of 400 prompt tokens, 64.0 %" in text
    assert "goodput: 4 requests, 100.0 %" in text
    assert "(mean ITL <= 1e+09 ms)" in text
    assert text.endswith("were all accepted, no 429")


def test_a_429_is_no_failure_and_shows_the_limit(bench: Bench) -> None:
    with load_server(refusing_above(3)) as server:
        done = bench(server, "--num-requests", "4", "--concurrency", "4")
    assert done.code == 0
    assert done.report["requests"] == {"sent": 4, "ok": 3, "refused": 1, "failed": 0}
    assert done.report["failures"] == {}
    # which of four requests on four connections comes last is not ours to choose
    (refused,) = (r for r in done.records if r["outcome"] == "refused")
    assert (refused["status"], refused["retry_after_s"]) == (429, 0.0)
    limit = done.report["limit"]
    assert limit["first_refused_in_flight"] == refused["in_flight"]
    assert f"first 429 with {refused['in_flight']} in flight" in done.printed


def test_failures_are_counted_by_what_they_are(bench: Bench) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.number == 0:
            await exchange.reply(500, {"error": {"message": "our fault"}})
        elif exchange.number == 1:
            await exchange.head()
            await exchange.frames([delta(content="a")])
            exchange.cut()
        elif exchange.number == 2:
            await exchange.head()
            await exchange.chunk(b"")
        else:
            await exchange.answer(stream_of("a", usage=None))

    with load_server(script) as server:
        done = bench(server, "--num-requests", "4")
    assert done.code == 0
    failures = {"status 500": 1, "broken stream": 1, "stream without [DONE]": 1}
    assert done.report["failures"] == failures
    assert done.report["requests"]["failed"] == 3
    assert done.report["without_usage"] == 1
    assert done.records[0]["detail"] == "our fault"
    for problem in failures:
        assert f"failed: 1 x {problem}" in done.printed
    assert "1 answers without usage" in done.printed
    assert "cache: the endpoint reports no cached tokens" in done.printed


def test_a_run_without_a_success_has_failed(bench: Bench) -> None:
    with load_server() as server:
        pass
    done = bench(server, *FEW, "--model-name", "m")
    assert done.code == 1
    assert done.report["failures"] == {"connection": 3}
    assert done.report["ttft_s"] is None


def test_a_conversation_carries_the_servers_replies(bench: Bench) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(
            [delta(reasoning_content="hm "), *stream_of(f"reply {exchange.number}")]
        )

    with load_server(script) as server:
        flags = ("--workload", "multi-turn", "--sessions", "1", "--turns", "3")
        done = bench(server, *flags)
    assert done.code == 0
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5]
    last = server.bodies[-1]["messages"]
    for number in (0, 1):
        reply = {"content": f"reply {number}", "reasoning_content": "hm "}
        assert last[2 * number + 1] == {"role": "assistant", **reply}
    assert last[:-2] == server.bodies[1]["messages"]
    assert [record["turn"] for record in done.records] == [0, 1, 2]


def test_an_agent_calls_again_and_again(bench: Bench) -> None:
    with load_server() as server:
        done = bench(server, "--workload", "agent", "--turns", "40", "--result-len", "2")
    assert done.report["requests"]["ok"] == 40
    assert [len(body["messages"]) for body in server.bodies] == list(range(1, 80, 2))
    assert all(
        after["messages"][: len(before["messages"])] == before["messages"]
        for before, after in zip(server.bodies, server.bodies[1:], strict=False)
    )


def test_an_interrupt_gives_the_report_of_what_was_complete(bench: Bench) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.number < 2:
            await always(exchange)
            return
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGINT)
    with load_server(script) as server:
        done = bench(server, "--num-requests", "9")
    assert done.code == 130
    assert done.report["is_interrupted"]
    assert done.report["interrupted_requests"] == 1
    assert done.report["requests"] == {"sent": 2, "ok": 2, "refused": 0, "failed": 0}
    assert "1 requests cut short by the interrupt" in done.printed
    assert signal.getsignal(signal.SIGINT) is before


# ---- replay -------------------------------------------------------------------------------------


def log_of(path: Path, *records: tuple[float, dict[str, Any]]) -> str:
    lines = (json.dumps({"timestamp": at_s, "body": body}) + "\n" for at_s, body in records)
    path.write_text("".join(lines))
    return str(path)


def test_a_log_is_sent_as_it_was(bench: Bench, tmp_path: Path) -> None:
    user = [{"role": "user", "content": "a"}]
    late = {"model": "x", "messages": user, "stream": True, "top_p": 0.25}
    early = {"model": "y", "prompt": "b", "stream": True}
    log = log_of(tmp_path / "log", (5.004, late), (5.0, early))
    with load_server() as server:
        done = bench(server, "--replay", log)
    assert done.code == 0
    assert server.bodies == [early, late]
    assert [exchange.path for exchange in server.seen] == [
        "/v1/completions",
        "/v1/chat/completions",
    ]
    assert server.listed == 0
    assert [record["scheduled_s"] for record in done.records] == pytest.approx([0.0, 0.004])
    assert done.report["late_s"]["count"] == 2
    assert done.report["length_unit"] is None
    assert f"models as recorded: replay of {log} at 1 times its speed" in done.printed


def test_a_log_can_be_faster_and_for_another_model(bench: Bench, tmp_path: Path) -> None:
    body = {"model": "x", "messages": [], "stream": True}
    log = log_of(tmp_path / "log", (0.0, body), (0.008, body))
    with load_server() as server:
        done = bench(server, "--replay", log, "--speed", "4", "--model-name", "z")
        assert [r["scheduled_s"] for r in done.records] == pytest.approx([0.0, 0.002])
        assert [sent["model"] for sent in server.bodies] == ["z", "z"]
        bench(server, "--replay", log, "--extra-body", '{"stream_options": {}}')
    assert server.bodies[-1] == {**body, "stream_options": {}}


# ---- plots --------------------------------------------------------------------------------------


def test_a_plot_is_written(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plot was drawn")
    with load_server(refusing_above(2)) as server:
        plot = tmp_path / "plot.svg"
        flags = ("--num-requests", "3", "--concurrency", "3", "--plot", str(plot))
        assert bench(server, *flags).code == 0
    assert b"<svg" in plot.read_bytes()


def test_a_run_without_successes_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plot was drawn")
    with load_server() as server:
        pass
    failed = bench_serve(server.url, "m", LoadSettings(num_requests=2))
    plot_serve(*failed, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with load_server() as server:
        words = refusal([server.url, "--plot", str(tmp_path / "plot.png")], capsys)
    assert "pip install 'moonlet[report]'" in words
    assert (server.listed, server.seen) == (0, [])
