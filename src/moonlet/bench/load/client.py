"""One request over HTTP, timed from the moment it is handed to the socket.

Headers are read and bytes are kept with their times; everything else waits until the answer is
complete. There is no limit on connections, so no request waits for another one in here.
"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import httpx2
import orjson

from moonlet.bench.load.sessions import Prepared
from moonlet.bench.load.stream import BROKEN, Arrival, Reading, read_body, read_stream

__all__ = ["Answer", "LoadClient", "retry_after_s"]

_DETAIL_CHARS = 200


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back for one request.

    Attributes:
        sent_s: When it was sent, on the run's clock.
        ended_s: When the last byte had come, or when it failed.
        status: HTTP status; None when there was no answer.
        retry_after_s: What a refusal asked for; None when it said nothing.
        reading: What a whole or a broken answer said.
        problem: Why it is no success: ``connection``, ``timeout``, ``status N`` or what the
            stream lacked; None for a success.
        detail: The server's or the socket's own words for the problem.
    """

    sent_s: float
    ended_s: float = 0.0
    status: int | None = None
    retry_after_s: float | None = None
    reading: Reading | None = None
    problem: str | None = None
    detail: str = ""


class LoadClient:
    """A client of one endpoint; use it as an async context manager.

    Args:
        base_url: Up to and including ``/v1``.
        api_key: Sent as bearer token.
        timeout_s: Seconds that one request may take in all.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # a proxy of the surroundings would be measured instead of the server
        self._http = httpx2.AsyncClient(
            headers=headers, timeout=None, limits=limits, trust_env=False
        )
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._clock = clock

    async def __aenter__(self) -> LoadClient:
        """Return the client; leaving the block closes its connections."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(self, prepared: Prepared) -> Answer:
        """Send a request and wait for the end of its answer; failures are answers too."""
        url = self._base_url + prepared.path
        request = self._http.build_request("POST", url, content=prepared.body)
        arrivals: list[Arrival] = []
        answer = Answer(sent_s=self._clock())
        is_stream = False
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.send(request, stream=True)
                answer.status = response.status_code
                answer.retry_after_s = retry_after_s(response.headers.get("retry-after"))
                is_stream = "event-stream" in response.headers.get("content-type", "")
                try:
                    async for data in response.aiter_raw():
                        # one by one: what had come before a stream broke is kept
                        arrivals.append(Arrival(self._clock(), data))  # noqa: PERF401
                finally:
                    await response.aclose()
        except TimeoutError:
            answer.problem = "timeout"
        except httpx2.TransportError as error:
            answer.problem = "connection" if answer.status is None else BROKEN
            answer.detail = str(error) or type(error).__name__
        answer.ended_s = self._clock()
        _interpret(answer, arrivals, is_stream)
        return answer


def _interpret(answer: Answer, arrivals: list[Arrival], is_stream: bool) -> None:
    """Fill in what the bytes say."""
    if answer.status is None:
        return
    body = b"".join(arrival.data for arrival in arrivals)
    if answer.status != 200:
        answer.problem = answer.problem or f"status {answer.status}"
        answer.detail = answer.detail or _message(body)
        return
    answer.reading = read_stream(arrivals) if is_stream else read_body(body)
    answer.problem = answer.problem or answer.reading.problem
    answer.detail = answer.detail or answer.reading.detail


def _message(body: bytes) -> str:
    try:
        message = orjson.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode("utf-8", "replace")
    return str(message)[:_DETAIL_CHARS]


def retry_after_s(value: str | None, now_s: float | None = None) -> float | None:
    """Read a ``Retry-After`` header: seconds, or a date.

    Args:
        value: The header; None when there is none.
        now_s: Seconds since the epoch, for a date; the system's when None.

    Returns:
        Seconds to wait, at least 0; None for no header or one that says neither.
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - (time.time() if now_s is None else now_s))
