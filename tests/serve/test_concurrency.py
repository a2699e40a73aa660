"""Many clients at once: nothing mixes, nobody blocks the rest, who leaves costs nothing."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import openai
import pytest

from moonlet.testing import ScriptedModel, reply_with
from tests.patience import PATIENCE_S
from tests.serve.running import (
    END,
    MODEL,
    USER,
    WEATHER,
    Running,
    answer,
    call,
    parse_frames,
    prompt_text,
    serving,
)


def _wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        pause.wait(0.005)


def _number_of(prompt: Any) -> int:
    return int(prompt_text(prompt).split("number ")[-1].split(".")[0])


async def _stream(client: openai.AsyncOpenAI, number: int) -> dict[str, Any]:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"number {number}."}],
        tools=[WEATHER],  # type: ignore[list-item]
        stream=True,
        stream_options={"include_usage": True},
    )
    result: dict[str, Any] = {"content": "", "reasoning": "", "arguments": "", "names": []}
    async for chunk in stream:
        if chunk.usage is not None and not chunk.choices:
            result["usage"] = chunk.usage.completion_tokens
        for choice in chunk.choices:
            delta = choice.delta
            result["content"] += delta.content or ""
            result["reasoning"] += (delta.model_extra or {}).get("reasoning_content", "")
            result["finish"] = choice.finish_reason or result.get("finish")
            for tool_call in delta.tool_calls or ():
                assert tool_call.function is not None
                result["arguments"] += tool_call.function.arguments or ""
                if tool_call.function.name:
                    result["names"].append(tool_call.function.name)
    return result


def test_fifty_streams_at_once_keep_apart() -> None:
    def script(prompt: Any) -> list[int]:
        number = _number_of(prompt)
        return answer(f"t{number}", f"c{number}", call("get_weather", city=f"v{number}"))

    async def all_streams(url: str) -> list[dict[str, Any]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            return await asyncio.gather(*(_stream(client, number) for number in range(50)))

    with serving(script, max_num_seqs=25) as running:
        results = asyncio.run(all_streams(running.url))
        running.engine.check()
        stats = running.engine.stats()
    for number, result in enumerate(results):
        assert result == {
            "content": f"c{number}",
            "reasoning": f"t{number}",
            "arguments": f'{{"city": "v{number}"}}',
            "names": ["get_weather"],
            "finish": "tool_calls",
            "usage": len(answer(f"t{number}", f"c{number}", call("f" * 11, city=f"v{number}"))) + 1,
        }
    assert stats.num_finished == 50
    assert stats.num_free_slots == stats.num_slots


def test_eight_streams_need_about_the_forward_calls_of_one() -> None:
    def forward_calls(num_streams: int) -> int:
        gate = threading.Event()
        model = ScriptedModel(
            reply_with(answer("t" * 20, "c" * 60), END),
            before_forward=lambda meta: gate.wait(PATIENCE_S),
        )
        with serving(model, max_num_seqs=num_streams) as running:
            threads = [threading.Thread(target=running.frames) for _ in range(num_streams)]
            for thread in threads:
                thread.start()
            # one request already waits in the closed gate, the rest is queued behind it
            _wait_until(lambda: _open_requests(running) == num_streams)
            gate.set()
            for thread in threads:
                thread.join()
            return running.engine.stats().num_forward_calls

    one, eight = forward_calls(1), forward_calls(8)
    assert one > 80
    assert eight <= one + 10


def _open_requests(running: Running) -> int:
    stats = running.engine.stats()
    return stats.num_running + stats.num_waiting


def test_the_first_content_leaves_before_the_last_step() -> None:
    reply = answer("t", "content")
    released = threading.Event()
    script = reply_with(reply, END)

    def gated(prompt: Any, output: Any) -> Any:
        # the model may not end the answer before the client has seen its beginning
        if len(output) == len(reply) - 3:
            assert released.wait(PATIENCE_S)
        return script(prompt, output)

    with serving(ScriptedModel(gated)) as running:
        seen = ""
        for chunk in running.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        ):
            seen += chunk.choices[0].delta.content or ""
            if seen:
                assert released.is_set() or running.engine.stats().num_finished == 0
                released.set()
    assert seen == "content"


@contextmanager
def _half_read(running: Running, body: dict[str, Any]) -> Iterator[Iterator[bytes]]:
    """Open a stream and read its beginning; leaving the block drops the connection.

    Yields the rest of the stream.
    """
    url = f"{running.url}/v1/chat/completions"
    with (
        httpx2.Client(trust_env=False, timeout=PATIENCE_S) as client,
        client.stream("POST", url, json=body) as response,
    ):
        pieces = response.iter_raw()
        next(pieces)
        yield pieces


@pytest.mark.parametrize("is_stream", [True, False])
def test_at_most_two_steps_run_for_a_client_that_left(
    is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowance = threading.Semaphore(10)
    model = ScriptedModel(
        lambda prompt, output: 65, before_forward=lambda meta: allowance.acquire(timeout=PATIENCE_S)
    )
    body = {"model": MODEL, "messages": USER, "stream": is_stream}
    with serving(model) as running:
        engine, is_aborted = running.engine, threading.Event()
        abort = engine.abort

        def noticed(request_id: str) -> None:
            abort(request_id)
            is_aborted.set()

        monkeypatch.setattr(engine, "abort", noticed)
        with ExitStack() as client:
            if is_stream:
                client.enter_context(_half_read(running, body))
            else:
                client.enter_context(_send_raw(running, body))
            _wait_until(lambda: engine.stats().num_generated_tokens >= 9)
        # the model stands still until the server has noticed that nobody listens
        assert is_aborted.wait(PATIENCE_S)
        steps = engine.stats().num_steps
        allowance.release(50)
        _wait_until(lambda: _open_requests(running) == 0)
        assert engine.stats().num_steps <= steps + 2
        assert engine.stats().num_aborted == 1
        _wait_until(lambda: running.server._service.num_requests == 0)
        engine.check()


def _send_raw(running: Running, body: dict[str, Any]) -> socket.socket:
    """Send a request on a bare socket without reading the answer."""
    content = json.dumps(body).encode()
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def test_two_hundred_aborted_requests_leave_nothing_behind() -> None:
    with serving(ScriptedModel(lambda prompt, output: 65), max_num_seqs=4) as running:
        for number in range(200):
            body = {"model": MODEL, "messages": USER, "stream": number % 3 != 0}
            connection = _send_raw(running, body)
            if number % 2:
                connection.recv(200) if number % 3 else None
            connection.close()
        _wait_until(lambda: running.server._service.num_requests == 0)
        _wait_until(lambda: _open_requests(running) == 0)
        running.engine.check()
        stats = running.engine.stats()
        assert stats.num_free_slots == stats.num_slots
        assert stats.num_free_pages == stats.num_pages
        assert running.chat(max_tokens=3).status_code == 200


def test_a_full_server_answers_429_with_retry_after() -> None:
    gate = threading.Event()
    model = ScriptedModel(
        lambda prompt, output: 65, before_forward=lambda meta: gate.wait(PATIENCE_S)
    )
    with (
        serving(model, max_num_seqs=1, max_requests=3, retry_after_s=7) as running,
        ExitStack() as streams,
    ):
        body = {"model": MODEL, "messages": USER, "stream": True}
        for _ in range(3):
            streams.enter_context(_half_read(running, body))
        for response in (
            running.chat(),
            running.post("/v1/completions", {"model": MODEL, "prompt": "x"}),
        ):
            assert response.status_code == 429
            assert response.headers["retry-after"] == "7"
            assert response.json()["error"]["type"] == "engine_overloaded_error"
        assert running.post("/tokenize", {"prompt": "x"}).status_code == 200
        streams.close()
        gate.set()
        _wait_until(lambda: running.server._service.num_requests == 0)
        assert running.chat(max_tokens=3).status_code == 200


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    reply = answer("t", "finished")
    gate = threading.Event()
    script = reply_with(reply, END)

    def gated(prompt: Any, output: Any) -> Any:
        if len(output) == 2:
            assert gate.wait(PATIENCE_S)
        return script(prompt, output)

    with serving(ScriptedModel(gated)) as running, ExitStack() as stack:
        body = {"model": MODEL, "messages": USER, "stream": True}
        rest = stack.enter_context(_half_read(running, body))
        running.server._service.is_draining = True
        ready = running.get("/ready")
        assert ready.status_code == 503
        assert ready.headers["retry-after"]
        assert running.get("/health").status_code == 200
        refused = running.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        running.server.should_exit = True
        gate.set()
        frames = parse_frames(b"".join(rest))
    text = "".join(f["choices"][0]["delta"].get("content", "") for f in frames[:-1])
    assert text == "finished"
    assert frames[-1] == "[DONE]"
