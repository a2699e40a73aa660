"""A scripted HTTP server for the load generator: every answer is what a test says, byte by byte."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.patience import PATIENCE_S

CRLF = "\r\n"
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 64},
}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """One frame of a chat stream."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def stream_of(*texts: str, usage: dict[str, Any] | None = USAGE) -> list[dict[str, Any]]:
    """Frames of a whole answer: role, texts, end, usage."""
    frames = [delta(role="assistant", content=""), *(delta(content=text) for text in texts)]
    frames.append(delta("stop"))
    return frames if usage is None else [*frames, {"choices": [], "usage": usage}]


@dataclass(slots=True)
class Exchange:
    """One request at the server, and the means to answer it."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    async def head(self, status: int = 200, **headers: str) -> None:
        """Send the status line and the headers of a chunked answer."""
        fields = {"content_type": "text/event-stream", "transfer_encoding": "chunked", **headers}
        lines = (f"{name.replace('_', '-')}: {value}" for name, value in fields.items())
        self.writer.write(f"HTTP/1.1 {status} X\r\n{CRLF.join(lines)}\r\n\r\n".encode())
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        """Send bytes as one chunk; none end the answer."""
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def frames(self, frames: Sequence[Any]) -> None:
        """Send frames, each as a chunk of its own."""
        for frame in frames:
            text = frame if isinstance(frame, str) else json.dumps(frame)
            await self.chunk(f"data: {text}\n\n".encode())

    async def answer(self, frames: Sequence[Any]) -> None:
        """Send a whole stream."""
        await self.head()
        await self.frames([*frames, "[DONE]"])
        await self.chunk(b"")

    async def reply(self, status: int, body: Any, **headers: str) -> None:
        """Send one JSON object."""
        await self.head(status, content_type="application/json", **headers)
        await self.chunk(json.dumps(body).encode())
        await self.chunk(b"")

    async def refuse(self, **headers: str) -> None:
        """Send a 429."""
        await self.reply(429, {"error": {"message": "full"}}, **headers)

    def cut(self) -> None:
        """Break the connection."""
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


@dataclass(slots=True)
class LoadServer:
    """A running server.

    Attributes:
        script: Answers requests; may be replaced between runs.
        seen: Requests for completions, in the order in which they came.
        listed: How often the models were listed.
        loop: The loop that the script runs in.
    """

    script: Script
    loop: asyncio.AbstractEventLoop
    seen: list[Exchange] = field(default_factory=list)
    listed: int = 0
    url: str = ""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Bodies of all requests."""
        return [exchange.body for exchange in self.seen]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                path, body = first.split()[1], json.loads(raw or b"{}")
                exchange = Exchange(len(self.seen), path, headers, body, writer)
                if path.endswith("/models"):
                    self.listed += 1
                    await exchange.reply(200, {"data": [{"id": "first-model"}]})
                else:
                    self.seen.append(exchange)
                    await self.script(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def always(exchange: Exchange) -> None:
    """Answer with three frames of text."""
    await exchange.answer(stream_of("one ", "two ", "three"))


@contextmanager
def load_server(script: Script = always) -> Iterator[LoadServer]:
    """Run a server in a thread with a loop of its own."""
    is_up, loop = threading.Event(), asyncio.new_event_loop()
    server = LoadServer(script, loop)
    over = asyncio.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        is_up.set()
        async with listener:
            await over.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert is_up.wait(PATIENCE_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
