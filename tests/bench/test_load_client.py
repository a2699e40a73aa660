import asyncio
import json
from typing import Any

import pytest

from moonlet.bench.load.client import Answer, LoadClient, retry_after_s
from moonlet.bench.load.sessions import Prepared
from tests.bench.load_server import Exchange, Script, always, delta, load_server, stream_of
from tests.patience import PATIENCE_S

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT = Prepared("/chat/completions", json.dumps(BODY).encode())


def ask(url: str, *, timeout_s: float = PATIENCE_S, key: str | None = None) -> Answer:
    """Send one request."""

    async def main() -> Answer:
        async with LoadClient(url, key, timeout_s) as client:
            return await client.send(CHAT)

    return asyncio.run(main())


def answer_to(script: Script, **options: Any) -> Answer:
    """What a script makes of one request."""
    with load_server(script) as server:
        return ask(server.url, **options)


def test_a_stream_is_read_and_timed() -> None:
    with load_server() as server:
        answer = ask(f"{server.url}/", key="secret")
    assert (answer.status, answer.problem, answer.detail) == (200, None, "")
    assert answer.reading is not None
    assert answer.reading.message["content"] == "one two three"
    times = answer.reading.token_times_s
    assert [answer.sent_s, *times, answer.ended_s] == sorted(
        [answer.sent_s, *times, answer.ended_s]
    )
    assert len(times) == 3
    (seen,) = server.seen
    assert (seen.path, seen.body) == ("/v1/chat/completions", BODY)
    assert seen.headers["authorization"] == "Bearer secret"
    # compressed frames would come in lumps
    assert seen.headers["accept-encoding"] == "identity"


def test_without_a_key_none_is_sent() -> None:
    with load_server() as server:
        ask(server.url)
    assert "authorization" not in server.seen[0].headers


def test_a_token_is_timed_when_it_comes() -> None:
    """The server writes a token only after the client's clock has gone on."""
    ticks = iter(range(1000))
    gate = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.frames([delta(content="a")])
        await gate.wait()
        await exchange.frames([delta(content="b"), delta("stop"), "[DONE]"])
        await exchange.chunk(b"")

    seen: list[float] = []

    def clock() -> float:
        # the first read opens the gate for the second one
        seen.append(float(next(ticks)))
        if len(seen) == 2:
            loop.call_soon_threadsafe(gate.set)
        return seen[-1]

    with load_server(script) as server:
        loop = server.loop

        async def main() -> Answer:
            async with LoadClient(server.url, None, PATIENCE_S, clock) as client:
                return await client.send(CHAT)

        answer = asyncio.run(main())
    assert answer.reading is not None
    assert answer.sent_s == 0.0
    first, second = answer.reading.token_times_s
    assert first == 1.0
    assert second >= 2.0


def test_a_refusal_says_when_to_come_back() -> None:
    async def full(exchange: Exchange) -> None:
        await exchange.refuse(retry_after="17")

    answer = answer_to(full)
    assert (answer.status, answer.problem, answer.detail) == (429, "status 429", "full")
    assert answer.retry_after_s == 17.0


async def fails(exchange: Exchange) -> None:
    await exchange.reply(500, {"error": {"message": "our fault"}})


async def speaks_html(exchange: Exchange) -> None:
    await exchange.reply(502, "<html>")


async def is_cut(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.frames(stream_of("one ")[:2])
    exchange.cut()


async def hangs_up(exchange: Exchange) -> None:
    exchange.cut()


async def forgets_done(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.frames(stream_of("one "))
    await exchange.chunk(b"")


async def dies(exchange: Exchange) -> None:
    await exchange.answer([delta(content="one "), {"error": {"message": "engine died"}}])


async def is_no_completion(exchange: Exchange) -> None:
    await exchange.reply(200, {"ok": True})


async def never_answers(exchange: Exchange) -> None:
    await asyncio.Event().wait()


async def never_ends(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.frames(stream_of("one "))
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "status", "problem", "detail"),
    [
        (fails, 500, "status 500", "our fault"),
        (speaks_html, 502, "status 502", "<html>"),
        (is_cut, 200, "broken stream", ""),
        (hangs_up, None, "connection", ""),
        (forgets_done, 200, "stream without [DONE]", ""),
        (dies, 200, "broken stream", "engine died"),
        (is_no_completion, 200, "answer is no completion", ""),
    ],
)
def test_each_failure_has_its_name(
    script: Script, status: int | None, problem: str, detail: str
) -> None:
    answer = answer_to(script)
    assert (answer.status, answer.problem) == (status, problem)
    assert detail in answer.detail
    assert answer.ended_s >= answer.sent_s


def test_what_came_before_a_stream_broke_is_kept() -> None:
    answer = answer_to(is_cut)
    assert answer.reading is not None
    assert len(answer.reading.token_times_s) == 1
    assert answer.detail


@pytest.mark.parametrize(("script", "status"), [(never_answers, None), (never_ends, 200)])
def test_a_request_has_an_end(script: Script, status: int | None) -> None:
    answer = answer_to(script, timeout_s=0.2)
    assert (answer.status, answer.problem) == (status, "timeout")


def test_nobody_listens() -> None:
    with load_server() as server:
        pass
    answer = ask(server.url)
    assert (answer.status, answer.problem) == (None, "connection")
    assert answer.detail


def test_an_answer_may_be_one_object() -> None:
    message = {"role": "assistant", "content": "hi"}

    async def script(exchange: Exchange) -> None:
        await exchange.reply(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

    answer = answer_to(script)
    assert answer.problem is None
    assert answer.reading is not None
    assert (answer.reading.message, answer.reading.token_times_s) == (message, [])


def test_requests_do_not_wait_for_each_other() -> None:
    """All of them are at the server before any is answered."""
    num, gate = 150, asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if exchange.number == num - 1:
            gate.set()
        await gate.wait()
        await always(exchange)

    async def main(url: str) -> list[Answer]:
        async with LoadClient(url, None, PATIENCE_S) as client:
            return await asyncio.gather(*(client.send(CHAT) for _ in range(num)))

    with load_server(script) as server:
        answers = asyncio.run(main(server.url))
    assert [answer.problem for answer in answers] == [None] * num


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        (" 12 ", 12.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        ("soon", None),
        ("-3", None),
        ("nan", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, now_s=60.0) == seconds
