"""Plays sessions against an endpoint: at given times, or so many at once.

One event loop. Times of arrival are counted from the start of the run, so a late start delays
nothing after it. Nothing here knows HTTP: `send` is any coroutine, and tests run on a clock of
their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from math import inf

from moonlet.bench.load.client import Answer
from moonlet.bench.load.record import OK, REFUSED, RequestRecord
from moonlet.bench.load.sessions import Prepared, Session

__all__ = ["LoadRun"]

# what a refused client waits where the server does not say
_RETRY_AFTER_S = 1.0


class LoadRun:
    """One run.

    Args:
        send: Sends a request; failures are answers too.
        clock: Seconds, that of the running loop.
        num_requests: Start no more than so many; retries do not count.
        duration_s: Start nothing after so many seconds.
        retries: How often a refused request is sent again.

    Attributes:
        records: Requests that have ended, in the order in which they did.
        in_flight: Requests that have not.
        interrupted: Requests that `stop` cut short.
        unsent_turns: Turns that were not reached because one before them found no success.
        elapsed_s: How long the run took.
    """

    def __init__(
        self,
        send: Callable[[Prepared], Awaitable[Answer]],
        clock: Callable[[], float],
        *,
        num_requests: int | None = None,
        duration_s: float | None = None,
        retries: int = 0,
    ) -> None:
        self._send = send
        self._clock = clock
        self._budget = inf if num_requests is None else num_requests
        self._duration_s = inf if duration_s is None else duration_s
        self._retries = retries
        self._began_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.records: list[RequestRecord] = []
        self.in_flight = 0
        self.interrupted = 0
        self.unsent_turns = 0
        self.elapsed_s = 0.0

    async def open_loop(self, arrivals: Iterator[tuple[float, Session]]) -> None:
        """Start each session at its time, whatever became of those before."""
        await self._run(self._start_all(arrivals))

    async def closed_loop(self, sessions: Iterator[Session], concurrency: int) -> None:
        """Keep so many sessions in flight; a new one starts when another has ended."""
        await self._run(self._work_all(sessions, concurrency))

    def stop(self) -> None:
        """End the run now; what has ended stays, what is in flight is cut short."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` ended it."""
        return self._is_stopped

    async def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        self._began_s = self._clock()
        self._task = asyncio.create_task(coroutine)
        try:
            await self._task
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
        finally:
            self.elapsed_s = self._now()

    def _now(self) -> float:
        return self._clock() - self._began_s

    def _may_start(self) -> bool:
        return self._budget > 0 and self._now() < self._duration_s

    async def _start_all(self, arrivals: Iterator[tuple[float, Session]]) -> None:
        async with asyncio.TaskGroup() as group:
            for at_s, session in arrivals:
                if at_s >= self._duration_s or self._budget <= 0:
                    return
                # made while there is time, so that its making delays no start
                prepared = session.prepare(0)
                await asyncio.sleep(max(0.0, at_s - self._now()))
                if not self._may_start():
                    return
                group.create_task(self._play(session, prepared, at_s))
                # the request starts before the next one is made
                await asyncio.sleep(0)

    async def _work_all(self, sessions: Iterator[Session], concurrency: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(sessions))

    async def _work(self, sessions: Iterator[Session]) -> None:
        while self._may_start() and (session := next(sessions, None)) is not None:
            last = await self._play(session, session.prepare(0), None)
            # a server that is full is not asked again at once
            if last is not None and last.outcome == REFUSED and not await self._wait(last):
                return

    async def _play(
        self, session: Session, prepared: Prepared, at_s: float | None
    ) -> RequestRecord | None:
        """Send a session's requests one after the other; return the last record."""
        record = None
        for turn in range(session.num_turns):
            if not self._may_start():
                return record
            self._budget -= 1
            if turn > 0:
                prepared, at_s = session.prepare(turn), None
            record, message = await self._attempt(session.index, turn, prepared, at_s)
            if record.outcome != OK:
                self.unsent_turns += session.num_turns - turn - 1
                return record
            session.add_reply(message)
        return record

    async def _attempt(
        self, session: int, turn: int, prepared: Prepared, at_s: float | None
    ) -> tuple[RequestRecord, dict[str, object]]:
        """Send a request, again while it is refused and may be; return the last answer."""
        attempt = 0
        while True:
            self.in_flight += 1
            in_flight = self.in_flight
            try:
                answer = await self._send(prepared)
            except asyncio.CancelledError:
                self.interrupted += 1
                raise
            finally:
                self.in_flight -= 1
            record = RequestRecord.from_answer(
                answer,
                self._began_s,
                session=session,
                turn=turn,
                attempt=attempt,
                scheduled_s=None if attempt else at_s,
                in_flight=in_flight,
            )
            self.records.append(record)
            is_over = record.outcome != REFUSED or attempt == self._retries
            if is_over or not await self._wait(record):
                return record, answer.reading.message if answer.reading else {}
            attempt += 1

    async def _wait(self, refused: RequestRecord) -> bool:
        """Wait as long as a refusal asks; tell whether the run goes on then."""
        asked = refused.retry_after_s
        seconds = _RETRY_AFTER_S if asked is None else asked
        if self._now() + seconds >= self._duration_s:
            return False
        await asyncio.sleep(seconds)
        return True
