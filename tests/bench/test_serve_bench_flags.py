import asyncio
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonlet.bench.load.settings import LoadSettings
from moonlet.bench.serve import bench_serve
from moonlet.cli.models import model_directory
from tests.bench.load_command import FEW, Bench, refusal
from tests.bench.load_server import Exchange, always, delta, load_server


def prompts(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["messages"][-1]["content"] for body in bodies]


# ---- each flag ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "values", "look"),
    [
        ("--model-name", ("a", "b"), lambda bodies: bodies[0]["model"]),
        ("--prompt-len", ("3", "uniform:8,9"), lambda b: len(prompts(b)[0].split()) < 8),
        ("--output-len", ("3", "4"), lambda bodies: {body["max_tokens"] for body in bodies}),
        ("--seed", ("1", "2"), prompts),
        ("--num-requests", ("1", "2"), len),
        ("--extra-body", ('{"a": 1}', '{"a": 2}'), lambda bodies: bodies[0]["a"]),
    ],
)
def test_a_flag_changes_what_is_sent(
    bench: Bench, flag: str, values: tuple[str, str], look: Callable[[Any], Any]
) -> None:
    found = []
    for value in values:
        with load_server() as server:
            others = () if flag == "--num-requests" else FEW
            assert bench(server, flag, value, *others).code == 0
            found.append(look(server.bodies))
            bench(server, flag, value, *others)
            # the same flags send the same again
            assert look(server.bodies[len(server.bodies) // 2 :]) == found[-1]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("workload", "flag", "look"),
    [
        ("shared-prefix", "--groups", lambda b: len({x["messages"][0]["content"] for x in b})),
        ("shared-prefix", "--prefix-len", lambda b: len(b[0]["messages"][0]["content"].split())),
        ("multi-turn", "--sessions", lambda b: sum(len(x["messages"]) == 1 for x in b)),
        ("multi-turn", "--turns", lambda b: max((len(x["messages"]) + 1) // 2 for x in b)),
        ("agent", "--sessions", lambda b: sum(len(x["messages"]) == 1 for x in b)),
        ("agent", "--result-len", lambda b: len(b[1]["messages"][-1]["content"].split())),
    ],
)
def test_a_flag_of_a_workload_is_its_number(
    bench: Bench, workload: str, flag: str, look: Callable[[Any], Any]
) -> None:
    small = {"agent": ("--turns", "2"), "multi-turn": ()}.get(workload, ("--num-requests", "5"))
    for value in (2, 3):
        with load_server() as server:
            assert bench(server, "--workload", workload, *small, flag, str(value)).code == 0
        assert look(server.bodies) == value


def test_switches_are_off_unless_given(bench: Bench, tmp_path: Path) -> None:
    with load_server() as server:
        bench(server, *FEW)
        bench(server, *FEW, "--ignore-eos")
        assert [body.get("ignore_eos") for body in server.bodies] == [None] * 3 + [True] * 3
        bench(server, *FEW, "--api-key", "secret")
        keys = [exchange.headers.get("authorization") for exchange in server.seen]
        assert keys == [None] * 6 + ["Bearer secret"] * 3
        directory = str(model_directory(None))
        assert bench(server, *FEW, "--tokenizer", directory).report["length_unit"] == "tokens"
        assert prompts(server.bodies)[-1] != prompts(server.bodies)[2]


def test_the_rate_sets_the_times(bench: Bench) -> None:
    with load_server() as server:
        slow = bench(server, *FEW, "--rate", "1000")
        fast = bench(server, *FEW, "--rate", "4000")
        other = bench(server, *FEW, "--rate", "4000", "--seed", "1")
    times = [sorted(r["scheduled_s"] for r in done.records) for done in (slow, fast, other)]
    assert times[0] == pytest.approx([4 * at_s for at_s in times[1]])
    assert times[1] != times[2]
    assert slow.report["late_s"]["count"] == 3
    assert all(r["sent_s"] >= r["scheduled_s"] for r in slow.records)


@pytest.mark.parametrize("concurrency", [2, 5])
def test_so_many_are_at_the_server_at_once(bench: Bench, concurrency: int) -> None:
    inside: set[int] = set()
    most: list[int] = []
    full = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        inside.add(exchange.number)
        most.append(len(inside))
        if len(inside) == concurrency:
            full.set()
        await full.wait()
        await always(exchange)
        inside.remove(exchange.number)

    with load_server(script) as server:
        done = bench(server, "--num-requests", "12", "--concurrency", str(concurrency))
    assert done.report["limit"]["most_in_flight"] == max(most) == concurrency


def test_a_duration_ends_the_starts(bench: Bench) -> None:
    with load_server() as server:
        assert bench(server, *FEW, "--duration", "1e-9").report["requests"]["sent"] == 0
        assert bench(server, *FEW, "--duration", "1000").report["requests"]["sent"] == 3
        # without a count it is the time alone that ends a run
        assert bench(server, "--duration", "0.01").report["settings"]["num_requests"] is None


def test_retries_ask_again(bench: Bench) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.number % 2 == 0:
            await exchange.refuse(retry_after="0")
        else:
            await always(exchange)

    for retries, outcomes in (("0", ["refused"]), ("1", ["refused", "ok"])):
        with load_server(script) as server:
            done = bench(server, "--num-requests", "1", "--retries", retries)
        assert [record["outcome"] for record in done.records] == outcomes
        assert done.code == (0 if "ok" in outcomes else 1)


def test_a_timeout_is_a_failure(bench: Bench) -> None:
    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(1.0)
        await always(exchange)

    with load_server(script) as server:
        short = bench(server, "--num-requests", "1", "--timeout", "0.05")
        long = bench(server, "--num-requests", "1", "--timeout", "300")
    assert short.report["failures"] == {"timeout": 1}
    assert long.report["failures"] == {}


def test_objectives_decide_what_is_good(bench: Bench) -> None:
    with load_server() as server:
        for flag in ("--slo-ttft-ms", "--slo-itl-ms"):
            # one that everything meets, and one that nothing does
            for value, good in (("1e9", 3), ("1e-9", 0)):
                if (flag, value) == ("--slo-itl-ms", "1e-9"):
                    server.script = paced
                assert bench(server, *FEW, flag, value).report["goodput"]["requests"] == good


async def paced(exchange: Exchange) -> None:
    """Let the client read the first token before there is a second one."""
    await exchange.head()
    await exchange.frames([delta(content="a")])
    await asyncio.sleep(0.05)
    await exchange.frames([delta(content="b"), "[DONE]"])
    await exchange.chunk(b"")


# ---- refusals and surroundings ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "0"], "--rate is 0.0; it must be above 0"),
        (["--rate", "1", "--concurrency", "2"], "give one"),
        (["--workload", "agents"], "agent"),
        (["--turns", "3"], "--turns has no effect on random"),
        (["--prompt-len", "some"], "--prompt-len is some"),
        (["--extra-body", "{"], "give a JSON object"),
        (["--replay", "no/such/log"], "--replay no/such/log cannot be read"),
        (["--json", "no/such/file"], "--json is no/such/file; its folder does not exist"),
        (["--requests", "no/such/file"], "--requests is no/such/file; its folder does not"),
        (["--tokenizer", "no/such", "--model-name", "m"], "no vocabulary in no/such"),
    ],
)
def test_bad_flags_are_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(["http://127.0.0.1:9/v1", *flags], capsys)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://h/v1", "http:///v1", "http://h:99999999/v1", "http://[bad/v1"],
)
@pytest.mark.parametrize("more", [[], ["--model-name", "m"]])
def test_bad_urls_are_one_line(
    url: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"URL is {url}; give an endpoint such as http" in refusal([url, *more], capsys)


def test_an_endpoint_that_names_no_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with load_server() as server:
        pass
    assert "cannot be used" in refusal([server.url], capsys)


def in_a_process(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_the_generator_needs_no_torch(tmp_path: Path) -> None:
    with load_server() as server:
        command = ["bench", "serve", server.url, *FEW, "--tokenizer", str(model_directory(None))]
        done = in_a_process(
            "import sys\nfrom moonlet.cli.main import run\n"
            f"assert run({command!r}) == 0\nassert 'torch' not in sys.modules\n"
        )
    assert done.returncode == 0, done.stderr
    assert len(server.seen) == 3


def test_a_missing_library_is_named() -> None:
    done = in_a_process(
        "import sys\nsys.modules['httpx2'] = None\nfrom moonlet.cli.main import run\n"
        "sys.exit(run(['bench', 'serve', 'http://127.0.0.1:9/v1']))\n"
    )
    assert done.returncode == 2
    assert "needs httpx2, which is not installed; pip install 'moonlet[server]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_progress_is_told() -> None:
    told: list[str] = []
    settings = LoadSettings(num_requests=2)
    with load_server() as server:
        result = bench_serve(server.url, "m", settings, on_progress=told.append)
    assert told[0] == "0 requests ended, 0 in flight"
    assert result.report["requests"]["ok"] == 2


def test_a_terminal_shows_the_progress_and_is_left_clean(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with load_server() as server, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        bench(server, *FEW)
    shown = terminal.getvalue()
    assert shown.startswith("\r\x1b[K0 requests ended, 0 in flight\r\x1b[K")
    assert shown.endswith("\r\x1b[K")
