import json
from typing import Any

import numpy as np
import pytest

from moonlet.bench.load.client import Answer
from moonlet.bench.load.record import RequestRecord
from moonlet.bench.load.report import distribution, find_limit, goodput, make_report
from moonlet.bench.load.stream import Reading

KEYS = ("mean", "p50", "p90", "p95", "p99")


def record(sent_s: float, ended_s: float, **fields: Any) -> RequestRecord:
    place = {"session": round(1e6 * sent_s), "turn": 0, "attempt": 0, "scheduled_s": None}
    return RequestRecord(
        **{**place, "sent_s": sent_s, "ended_s": ended_s, "in_flight": 1, **fields}
    )


def refused(sent_s: float, ended_s: float, **fields: Any) -> RequestRecord:
    return record(sent_s, ended_s, outcome="refused", status=429, problem="status 429", **fields)


def failed(sent_s: float, problem: str, status: int | None = None) -> RequestRecord:
    return record(sent_s, sent_s + 1, outcome="failed", status=status, problem=problem)


# ---- records ------------------------------------------------------------------------------------


def test_a_record_has_the_times_of_the_answer() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 6}
    reading = Reading([10.5, 10.75, 11.5], finish_reason="length", usage=usage)
    answer = Answer(sent_s=10.0, ended_s=12.0, status=200, reading=reading)
    made = RequestRecord.from_answer(
        answer, 8.0, session=3, turn=1, attempt=2, scheduled_s=1.5, in_flight=4
    )
    assert (made.sent_s, made.ended_s, made.e2e_s) == (2.0, 4.0, 2.0)
    assert (made.ttft_s, made.itl_s) == (0.5, [0.25, 0.75])
    # five tokens followed the first, some of them without a frame of their own
    assert made.tpot_s == pytest.approx(1.0 / 5)
    assert (made.session, made.turn, made.attempt, made.in_flight) == (3, 1, 2, 4)
    assert (made.outcome, made.problem, made.finish_reason) == ("ok", None, "length")
    assert (made.prompt_tokens, made.completion_tokens, made.cached_tokens) == (9, 6, None)
    assert json.loads(json.dumps(made.to_json()))["itl_s"] == [0.25, 0.75]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"status": 200}, "ok"),
        ({"status": 429, "problem": "status 429", "retry_after_s": 3.0}, "refused"),
        ({"status": 503, "problem": "status 503", "retry_after_s": 3.0}, "failed"),
        ({"status": None, "problem": "connection"}, "failed"),
        ({"status": 200, "problem": "broken stream"}, "failed"),
    ],
)
def test_refusals_are_no_failures(answer: dict[str, Any], outcome: str) -> None:
    place = {"session": 0, "turn": 0, "attempt": 0, "scheduled_s": None, "in_flight": 1}
    made = RequestRecord.from_answer(Answer(sent_s=0.0, **answer), 0.0, **place)
    assert made.outcome == outcome
    assert made.retry_after_s == answer.get("retry_after_s")
    assert made.ttft_s is None
    assert made.tpot_s is None


@pytest.mark.parametrize("tokens", [None, 1])
def test_one_token_or_an_unknown_number_has_no_time_per_token(tokens: int | None) -> None:
    assert record(0, 1, ttft_s=0.5, completion_tokens=tokens).tpot_s is None


# ---- figures ------------------------------------------------------------------------------------


def test_percentiles_lie_between_the_values() -> None:
    found = distribution([*range(1, 101), None])
    assert found is not None
    assert found["count"] == 100
    assert found["mean"] == 50.5
    shown = [found[key] for key in ("p50", "p90", "p95", "p99")]
    assert shown == pytest.approx([50.5, 90.1, 95.05, 99.01])
    skewed = np.random.default_rng(0).exponential(size=999)
    found = distribution(skewed.tolist())
    assert found is not None
    for percent in (50, 90, 95, 99):
        # so many values lie at or below, counting the one it may fall on
        assert sum(skewed <= found[f"p{percent}"]) == 1 + 998 * percent // 100
    assert distribution([7.0]) == {**dict.fromkeys(KEYS, 7.0), "count": 1}
    assert distribution([None]) is None


def test_a_report_counts_and_divides() -> None:
    tokens = {"prompt_tokens": 100, "completion_tokens": 11, "cached_tokens": 60}
    records = [
        record(0.0, 2.0, ttft_s=0.5, itl_s=[0.1, 0.2], finish_reason="stop", **tokens),
        record(1.0, 4.0, ttft_s=1.5, itl_s=[0.3], finish_reason="length", **tokens),
        record(2.0, 4.0, ttft_s=1.0, finish_reason="stop"),
        refused(2.5, 2.6, retry_after_s=4.0, scheduled_s=2.25),
        failed(3.0, "connection"),
        failed(3.5, "connection"),
        failed(4.0, "status 500", 500),
    ]
    report = make_report(records, 5.0)
    assert json.loads(json.dumps(report)) == report
    assert report["requests"] == {"sent": 7, "ok": 3, "refused": 1, "failed": 3}
    assert report["failures"] == {"connection": 2, "status 500": 1}
    assert report["finish_reasons"] == {"stop": 2, "length": 1}
    assert report["retry_after_s"]["mean"] == 4.0
    assert report["late_s"] == distribution([0.25])
    assert report["ttft_s"] == distribution([0.5, 1.5, 1.0])
    assert report["itl_s"] == distribution([0.1, 0.2, 0.3])
    assert report["e2e_s"] == distribution([2.0, 3.0, 2.0])
    assert report["tpot_s"] == pytest.approx({**dict.fromkeys(KEYS, 0.03), "count": 2})
    assert report["requests_per_s"] == pytest.approx(3 / 5)
    assert (report["prompt_tokens"], report["completion_tokens"]) == (200, 22)
    assert report["prompt_tokens_per_s"] == pytest.approx(40)
    assert report["completion_tokens_per_s"] == pytest.approx(4.4)
    assert report["without_usage"] == 1
    assert report["cache"] == {"cached_tokens": 120, "prompt_tokens": 200, "share": 0.6}
    assert report["goodput"] is None


def test_a_run_without_successes_is_a_report_too() -> None:
    for records in ([], [failed(0.0, "connection")]):
        report = make_report(records, 0.0, slo_ttft_s=1.0)
        assert json.loads(json.dumps(report)) == report
        assert report["ttft_s"] is report["cache"] is report["late_s"] is None
        assert report["goodput"] == {"requests": 0, "share": 0.0, "requests_per_s": 0.0}


def test_cached_tokens_are_related_to_prompts_that_name_them() -> None:
    known = record(0, 1, prompt_tokens=100, cached_tokens=0)
    unknown = record(0, 1, prompt_tokens=900)
    assert make_report([unknown], 1.0)["cache"] is None
    cache = make_report([known, unknown], 1.0)["cache"]
    assert cache == {"cached_tokens": 0, "prompt_tokens": 100, "share": 0.0}


def test_goodput_is_what_met_every_objective() -> None:
    records = [
        record(0.0, 1, ttft_s=0.1, itl_s=[0.01, 0.03]),
        record(0.1, 1, ttft_s=0.3, itl_s=[0.01]),
        record(0.2, 1, ttft_s=0.1, itl_s=[0.09]),
        record(0.3, 1, ttft_s=0.1),
        record(0.4, 1),
        refused(0.5, 0.6, ttft_s=0.0),
        failed(0.6, "connection"),
        record(0.7, 1, ttft_s=0.2, itl_s=[0.02]),
    ]

    def good(ttft_s: float | None, itl_s: float | None) -> Any:
        found = goodput(records, 4.0, ttft_s, itl_s)
        assert found is not None
        assert found["share"] == pytest.approx(found["requests"] / 8)
        assert found["requests_per_s"] == pytest.approx(found["requests"] / 4)
        return found["requests"]

    assert good(0.2, 0.02) == 3
    assert good(0.2, None) == 4
    assert good(0.5, None) == 5
    assert good(None, 0.02) == 5
    assert good(None, 0.1) == 6
    assert goodput(records, 4.0, None, None) is None


def test_a_request_sent_again_counts_once() -> None:
    place = {"session": 5, "turn": 2}
    records = [refused(0, 1, **place), record(2, 3, ttft_s=0.1, **{**place, "attempt": 1})]
    found = goodput(records, 1.0, 1.0, None)
    assert found is not None
    assert (found["requests"], found["share"]) == (1, 1.0)


# ---- the limit ----------------------------------------------------------------------------------


def test_the_limit_lies_below_the_first_refusal() -> None:
    held = [record(t / 10, 9.0, in_flight=t + 1) for t in range(4)]
    more = [refused(0.4, 0.45, in_flight=5), refused(0.41, 0.46, in_flight=6)]
    assert find_limit([*more, *held]) == {
        "accepted_in_flight": 4,
        "first_refused_in_flight": 5,
        "most_in_flight": 6,
    }


def test_without_refusals_the_limit_is_open() -> None:
    assert find_limit([]) == {
        "accepted_in_flight": 0,
        "first_refused_in_flight": None,
        "most_in_flight": 0,
    }
    found = find_limit([record(0, 2, in_flight=1), record(1, 3, in_flight=2)])
    assert (found["accepted_in_flight"], found["first_refused_in_flight"]) == (2, None)


def test_requests_that_follow_each_other_are_not_in_flight_together() -> None:
    found = find_limit([record(t, t + 1) for t in range(5)])
    assert found["accepted_in_flight"] == 1


def test_a_request_that_was_not_accepted_spoils_the_ones_around_it() -> None:
    spoiled = [record(0, 9), record(1, 9), failed(2, "connection"), record(2.5, 2.75)]
    assert find_limit(spoiled)["accepted_in_flight"] == 2
    # when it is gone the rest counts again
    assert find_limit([*spoiled, record(4, 9)])["accepted_in_flight"] == 3
    # a stream that broke had been accepted
    broken = record(2, 3, outcome="failed", problem="broken stream")
    assert find_limit([record(0, 9), broken])["accepted_in_flight"] == 2


def test_the_first_refusal_is_the_first_sent() -> None:
    records = [refused(3, 3.1, in_flight=7), refused(1, 8, in_flight=2), record(0, 9)]
    assert find_limit(records)["first_refused_in_flight"] == 2
