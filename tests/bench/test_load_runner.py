import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from moonlet.bench.load.client import Answer
from moonlet.bench.load.report import find_limit
from moonlet.bench.load.runner import LoadRun
from moonlet.bench.load.sessions import Conversation, Prepared, Session, Turn
from moonlet.bench.load.stream import Reading
from tests.bench.virtual_time import VirtualLoop, run_virtual


def conversations(num: int, turns: int = 1) -> list[Session]:
    """Sessions whose texts are their number and turn."""
    return [
        Conversation(i, tuple(Turn(f"{i}.{turn}", 1) for turn in range(turns)), {})
        for i in range(num)
    ]


class Endpoint:
    """An endpoint without HTTP: takes a fixed time, and refuses more than it has places for.

    Attributes:
        asked: Loop times and last texts of all requests.
    """

    def __init__(
        self, seconds: float = 1.0, places: int = 10**9, retry_after_s: float | None = None
    ) -> None:
        self.seconds = seconds
        self.places = places
        self.retry_after_s = retry_after_s
        self.asked: list[tuple[float, str]] = []
        self.histories: list[list[str]] = []
        self.busy = 0

    async def send(self, prepared: Prepared) -> Answer:
        loop = asyncio.get_running_loop()
        messages = json.loads(prepared.body)["messages"]
        sent_s = loop.time()
        self.asked.append((sent_s, messages[-1]["content"]))
        self.histories.append([message["content"] for message in messages])
        answer = Answer(sent_s=sent_s, status=200)
        if self.busy == self.places:
            answer.status, answer.problem = 429, "status 429"
            answer.retry_after_s = self.retry_after_s
        else:
            self.busy += 1
            try:
                await asyncio.sleep(self.seconds)
            finally:
                self.busy -= 1
            text = f"to {messages[-1]['content']}"
            answer.reading = Reading(message={"role": "assistant", "content": text})
        answer.ended_s = loop.time()
        return answer


def play(
    send: Callable[[Prepared], Awaitable[Answer]],
    sessions: list[Session],
    *,
    times: list[float] | None = None,
    concurrency: int = 1,
    stop_at: float | None = None,
    **limits: Any,
) -> LoadRun:
    """Play sessions in virtual time, at times or so many at once."""

    async def main() -> LoadRun:
        loop = asyncio.get_running_loop()
        run = LoadRun(send, loop.time, **limits)
        if stop_at is not None:
            loop.call_later(stop_at, run.stop)
        if times is None:
            await run.closed_loop(iter(sessions), concurrency)
        else:
            await run.open_loop(iter(zip(times, sessions, strict=True)))
        return run

    return run_virtual(main())


def texts(endpoint: Endpoint) -> list[str]:
    return [text for _, text in endpoint.asked]


def test_requests_start_at_their_times_whatever_the_endpoint_does() -> None:
    times = [0.5, 0.75, 0.75, 3.0, 100.0]
    endpoint = Endpoint(seconds=50.0)
    run = play(endpoint.send, conversations(5), times=times)
    assert [at_s for at_s, _ in endpoint.asked] == pytest.approx(times)
    assert texts(endpoint) == ["0.0", "1.0", "2.0", "3.0", "4.0"]
    records = sorted(run.records, key=lambda record: record.session)
    assert [record.scheduled_s for record in records] == times
    assert [record.in_flight for record in records] == [1, 2, 3, 4, 1]
    assert run.elapsed_s == pytest.approx(150.0)
    assert run.in_flight == 0


def test_a_late_start_delays_nothing_after_it() -> None:
    endpoint = Endpoint(seconds=0.5)
    times = [float(t) for t in range(1, 7)]

    async def send(prepared: Prepared) -> Answer:
        if not endpoint.asked:
            # the process is busy for so long that two starts are missed
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.now += 2.25
        return await endpoint.send(prepared)

    run = play(send, conversations(6), times=times)
    started = sorted(at_s for at_s, _ in endpoint.asked)
    assert started == pytest.approx([3.25, 3.25, 3.25, 4.0, 5.0, 6.0])
    late = {r.session: r.sent_s - (r.scheduled_s or 0.0) for r in run.records}
    assert [late[i] for i in range(6)] == pytest.approx([2.25, 1.25, 0.25, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(("concurrency", "waves"), [(1, 10), (3, 4), (10, 1), (50, 1)])
def test_so_many_are_in_flight_and_no_more(concurrency: int, waves: int) -> None:
    endpoint = Endpoint(seconds=2.0)
    run = play(endpoint.send, conversations(10), concurrency=concurrency)
    assert max(record.in_flight for record in run.records) == min(concurrency, 10)
    assert len(run.records) == 10
    assert run.elapsed_s == pytest.approx(2.0 * waves)
    assert all(record.scheduled_s is None for record in run.records)


def test_turns_of_a_session_wait_for_each_other_and_carry_the_replies() -> None:
    endpoint = Endpoint(seconds=1.0)
    run = play(endpoint.send, conversations(2, turns=3), concurrency=2)
    assert texts(endpoint) == ["0.0", "1.0", "0.1", "1.1", "0.2", "1.2"]
    assert endpoint.histories[-2] == ["0.0", "to 0.0", "0.1", "to 0.1", "0.2"]
    assert [(r.session, r.turn) for r in run.records[-2:]] == [(0, 2), (1, 2)]
    assert run.unsent_turns == 0


def test_only_the_first_turn_has_a_time() -> None:
    run = play(Endpoint().send, conversations(1, turns=3), times=[2.0])
    assert [record.scheduled_s for record in run.records] == [2.0, None, None]
    assert [record.sent_s for record in run.records] == pytest.approx([2.0, 3.0, 4.0])


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("times", [None, [1.0, 2.0, 3.0]])
def test_no_more_requests_start_than_wanted(num_requests: int, times: list[float] | None) -> None:
    endpoint = Endpoint(seconds=1.5)
    run = play(endpoint.send, conversations(3, turns=2), times=times, num_requests=num_requests)
    assert len(endpoint.asked) == len(run.records) == num_requests
    assert run.unsent_turns == 0


@pytest.mark.parametrize(("duration", "started"), [(2.5, 3), (4.5, 5)])
def test_nothing_starts_after_the_duration(duration: float, started: int) -> None:
    closed = play(Endpoint(seconds=1.0).send, conversations(9), duration_s=duration)
    # what has started is finished
    assert len(closed.records) == started
    assert closed.elapsed_s == pytest.approx(started)
    times = [float(t) for t in range(9)]
    opened = play(Endpoint(seconds=9.0).send, conversations(9), times=times, duration_s=duration)
    assert len(opened.records) == started
    one = play(Endpoint(seconds=1.0).send, conversations(1, turns=9), duration_s=duration)
    assert len(one.records) == started


def test_the_limit_of_an_endpoint_is_found() -> None:
    endpoint = Endpoint(seconds=10.0, places=4)
    times = [t / 10 for t in range(8)] + [20.0]
    run = play(endpoint.send, conversations(9), times=times)
    outcomes = [r.outcome for r in sorted(run.records, key=lambda record: record.session)]
    assert outcomes == ["ok"] * 4 + ["refused"] * 4 + ["ok"]
    limit = find_limit(run.records)
    assert (limit["accepted_in_flight"], limit["first_refused_in_flight"]) == (4, 5)


@pytest.mark.parametrize(("asked_s", "again_at"), [(7.0, 7.0), (None, 1.0), (0.0, 0.0)])
def test_a_refused_request_is_sent_again_when_it_may(
    asked_s: float | None, again_at: float
) -> None:
    endpoint = Endpoint(seconds=3.0, places=0, retry_after_s=asked_s)

    async def send(prepared: Prepared) -> Answer:
        answer = await endpoint.send(prepared)
        endpoint.places = 1
        return answer

    run = play(send, conversations(1, turns=2), retries=1)
    assert [r.outcome for r in run.records] == ["refused", "ok", "ok"]
    assert [(r.turn, r.attempt) for r in run.records] == [(0, 0), (0, 1), (1, 0)]
    assert [r.sent_s for r in run.records] == pytest.approx([0.0, again_at, again_at + 3.0])
    assert endpoint.histories[0] == endpoint.histories[1]
    assert run.unsent_turns == 0


def test_an_attempt_after_a_refusal_is_not_late() -> None:
    run = play(Endpoint(places=0).send, conversations(1), times=[2.0], retries=1)
    assert [record.scheduled_s for record in run.records] == [2.0, None]


def test_a_session_ends_with_the_last_refusal() -> None:
    for retries in (0, 2):
        endpoint = Endpoint(places=0)
        run = play(endpoint.send, conversations(1, turns=5), times=[0.0], retries=retries)
        assert [r.attempt for r in run.records] == list(range(retries + 1))
        assert run.unsent_turns == 4


def test_a_full_endpoint_is_not_asked_again_at_once() -> None:
    endpoint = Endpoint(places=0, retry_after_s=5.0)
    run = play(endpoint.send, conversations(4))
    assert [r.sent_s for r in run.records] == pytest.approx([0.0, 5.0, 10.0, 15.0])
    # and not at all when the run would be over by then
    run = play(endpoint.send, conversations(4), duration_s=6.0, retries=3)
    assert [r.sent_s for r in run.records] == pytest.approx([0.0, 5.0])
    assert run.elapsed_s == pytest.approx(5.0)


def test_a_failure_ends_its_session_and_no_other() -> None:
    endpoint = Endpoint(seconds=1.0)

    async def send(prepared: Prepared) -> Answer:
        answer = await endpoint.send(prepared)
        if b'"0.1"' in prepared.body:
            answer.problem = "broken stream"
        return answer

    run = play(send, conversations(3, turns=4), concurrency=2)
    found = {i: [r.outcome for r in run.records if r.session == i] for i in range(3)}
    assert found == {0: ["ok", "failed"], 1: ["ok"] * 4, 2: ["ok"] * 4}
    assert run.unsent_turns == 2


@pytest.mark.parametrize("times", [None, [0.0, 0.0, 7.0]])
def test_stopping_keeps_what_had_ended(times: list[float] | None) -> None:
    async def send(prepared: Prepared) -> Answer:
        return await Endpoint(seconds=1.0 if b'"0.0"' in prepared.body else 50.0).send(prepared)

    run = play(send, conversations(3), times=times, concurrency=2, stop_at=5.0)
    assert run.is_stopped
    assert [(r.session, r.outcome) for r in run.records] == [(0, "ok")]
    # in the closed loop the third session had taken the place of the first
    assert run.interrupted == (2 if times is None else 1)
    assert run.in_flight == 0
    assert run.elapsed_s == pytest.approx(5.0)


def test_an_error_of_ours_is_not_a_failed_request() -> None:
    async def send(prepared: Prepared) -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        play(send, conversations(1))
    assert caught.group_contains(ZeroDivisionError)


def test_cancelling_the_whole_is_not_swallowed() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        run = LoadRun(Endpoint(seconds=50.0).send, loop.time)
        task = asyncio.create_task(run.closed_loop(iter(conversations(1)), 1))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


def test_sessions_are_made_when_they_are_needed() -> None:
    made: list[int] = []

    def endless() -> Iterator[Session]:
        index = 0
        while True:
            made.append(index)
            yield conversations(index + 1)[index]
            index += 1

    async def main() -> None:
        loop = asyncio.get_running_loop()
        run = LoadRun(Endpoint().send, loop.time, duration_s=3.5)
        await run.closed_loop(endless(), 2)

    run_virtual(main())
    assert len(made) == 8
