"""Figures of a run, from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from moonlet.bench.load.record import FAILED, OK, REFUSED, RequestRecord

__all__ = ["PERCENTILES", "distribution", "find_limit", "goodput", "make_report"]

PERCENTILES = (50, 90, 95, 99)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return count, mean and percentiles (linear between neighbours); None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    found = np.percentile(known, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"count": len(known), "mean": float(np.mean(known)), **named}


def goodput(
    records: Sequence[RequestRecord],
    elapsed_s: float,
    slo_ttft_s: float | None,
    slo_itl_s: float | None,
) -> dict[str, Any] | None:
    """Return how many requests met the objectives; None when there are none.

    A request whose first token was not seen does not meet an objective for it. The gaps of a
    request are judged by their mean; one without gaps meets any. Refused and failed requests
    count among all and meet nothing; of one that was sent again the last attempt counts.
    """
    if slo_ttft_s is None and slo_itl_s is None:
        return None

    def is_good(record: RequestRecord) -> bool:
        if record.outcome != OK:
            return False
        if slo_ttft_s is not None and (record.ttft_s is None or record.ttft_s > slo_ttft_s):
            return False
        gaps = record.itl_s
        return slo_itl_s is None or not gaps or sum(gaps) / len(gaps) <= slo_itl_s

    last = {(record.session, record.turn): record for record in records}
    good = sum(map(is_good, last.values()))
    return {
        "requests": good,
        "share": good / len(last) if last else 0.0,
        "requests_per_s": good / elapsed_s if elapsed_s > 0 else 0.0,
    }


def find_limit(records: Iterable[RequestRecord]) -> dict[str, int | None]:
    """Return what was in flight when all was accepted, and when the first 429 came.

    Returns:
        ``accepted_in_flight``: the most requests that were in flight at once while every one of
        them was accepted in the end (status 200). ``first_refused_in_flight``: how many there
        were, itself included, when the first request was sent that got a 429; None without one.
        ``most_in_flight``: whatever became of them.
    """
    records = sorted(records, key=lambda record: record.sent_s)
    first = next((r.in_flight for r in records if r.outcome == REFUSED), None)
    # at equal times an end comes first: the place was free
    events = sorted(
        (at_s, step, record.status == 200)
        for record in records
        for at_s, step in ((record.ended_s, -1), (record.sent_s, 1))
    )
    most = accepted = others = 0
    for _, step, is_accepted in events:
        if is_accepted:
            accepted += step
        else:
            others += step
        if others == 0:
            most = max(most, accepted)
    return {
        "accepted_in_flight": most,
        "first_refused_in_flight": first,
        "most_in_flight": max((record.in_flight for record in records), default=0),
    }


def make_report(
    records: Sequence[RequestRecord],
    elapsed_s: float,
    *,
    slo_ttft_s: float | None = None,
    slo_itl_s: float | None = None,
) -> dict[str, Any]:
    """Return every figure of a run.

    Args:
        records: Of the requests that ended, refused attempts included.
        elapsed_s: Length of the run.
        slo_ttft_s: Objective for the first token.
        slo_itl_s: Objective for the mean gap.

    Returns:
        JSON values. Latencies are those of successes. Counts of tokens are the server's; a
        request without usage counts none and is in ``without_usage``.
    """
    good = [record for record in records if record.outcome == OK]
    rate = 1 / elapsed_s if elapsed_s > 0 else 0.0
    prompt = sum(record.prompt_tokens or 0 for record in good)
    completion = sum(record.completion_tokens or 0 for record in good)
    late = (r.sent_s - r.scheduled_s for r in records if r.scheduled_s is not None)
    return {
        "elapsed_s": elapsed_s,
        "requests": {
            "sent": len(records),
            **{name: sum(r.outcome == name for r in records) for name in (OK, REFUSED, FAILED)},
        },
        "failures": dict(Counter(r.problem for r in records if r.outcome == FAILED)),
        "finish_reasons": dict(Counter(str(r.finish_reason) for r in good)),
        "retry_after_s": distribution(r.retry_after_s for r in records if r.outcome == REFUSED),
        "limit": find_limit(records),
        "ttft_s": distribution(r.ttft_s for r in good),
        "itl_s": distribution(gap for r in good for gap in r.itl_s),
        "e2e_s": distribution(r.e2e_s for r in good),
        "tpot_s": distribution(r.tpot_s for r in good),
        "late_s": distribution(late),
        "requests_per_s": len(good) * rate,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "without_usage": sum(r.completion_tokens is None for r in good),
        "prompt_tokens_per_s": prompt * rate,
        "completion_tokens_per_s": completion * rate,
        "cache": _cache(good),
        "goodput": goodput(records, elapsed_s, slo_ttft_s, slo_itl_s),
    }


def _cache(records: Iterable[RequestRecord]) -> dict[str, Any] | None:
    """Return cached and prompt tokens of requests whose usage names both; None without any."""
    known = [
        (record.cached_tokens, record.prompt_tokens)
        for record in records
        if record.cached_tokens is not None and record.prompt_tokens is not None
    ]
    if not known:
        return None
    cached, prompt = (sum(values) for values in zip(*known, strict=True))
    return {
        "cached_tokens": cached,
        "prompt_tokens": prompt,
        "share": cached / prompt if prompt else 0.0,
    }
