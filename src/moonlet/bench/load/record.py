"""What is kept of one request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from moonlet.bench.load.client import Answer
from moonlet.bench.load.stream import Reading

__all__ = ["RequestRecord"]

OK, REFUSED, FAILED = "ok", "refused", "failed"
TOO_MANY = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request and its answer; all times in seconds, points in time from the run's start.

    Attributes:
        session: Number of its session; of the line, in order of time, of a replay.
        turn: Its place in the session.
        attempt: 0, or how often it had been refused before.
        scheduled_s: When it was to start; None where that hung on another answer.
        sent_s: When it started.
        ended_s: When its last byte had come, or when it failed.
        in_flight: Requests in flight once it had started, itself included.
        outcome: ``ok``, ``refused`` (429) or ``failed``.
        status: HTTP status; None when there was no answer.
        problem: What failed; None for a success.
        detail: The server's own words for it.
        retry_after_s: What a refusal asked for.
        ttft_s: From start to the first frame with text; None when there was none.
        itl_s: The gaps between frames with text.
        prompt_tokens: Of the server's usage; None where it gave none, as for the next two.
        completion_tokens: Tokens of the answer.
        cached_tokens: Tokens of the prompt from the server's cache.
        finish_reason: As the server said.
    """

    session: int
    turn: int
    attempt: int
    scheduled_s: float | None
    sent_s: float
    ended_s: float
    in_flight: int
    outcome: str = OK
    status: int | None = 200
    problem: str | None = None
    detail: str = ""
    retry_after_s: float | None = None
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None

    @classmethod
    def from_answer(cls, answer: Answer, began_s: float, **place: Any) -> RequestRecord:
        """Make the record of an answer.

        Args:
            answer: With times on the run's clock.
            began_s: The run's start on that clock.
            place: Session, turn, attempt, scheduled_s and in_flight.
        """
        reading = answer.reading or Reading()
        times = reading.token_times_s
        outcome = OK if answer.problem is None else FAILED
        return cls(
            **place,
            sent_s=answer.sent_s - began_s,
            ended_s=answer.ended_s - began_s,
            outcome=REFUSED if answer.status == TOO_MANY else outcome,
            status=answer.status,
            problem=answer.problem,
            detail=answer.detail,
            retry_after_s=answer.retry_after_s,
            ttft_s=times[0] - answer.sent_s if times else None,
            itl_s=[after - before for before, after in pairwise(times)],
            prompt_tokens=reading.count("prompt_tokens"),
            completion_tokens=reading.count("completion_tokens"),
            cached_tokens=reading.cached_tokens,
            finish_reason=reading.finish_reason,
        )

    @property
    def e2e_s(self) -> float:
        """From start to the last byte."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None without usage or a second token."""
        if self.ttft_s is None or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return sum(self.itl_s) / (self.completion_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON value."""
        return dataclasses.asdict(self)
