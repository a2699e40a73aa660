"""Requests: what is refused, with the field named, and what a sequence derives."""

import math

import pytest

from moonlet.core.errors import RequestError
from moonlet.engine.request import EngineRequest, RequestState, SamplingParams, Sequence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("seed", 1.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop_token_ids", {-1}),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_bad_value_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("top_p", 1),
        ("top_k", -1),
        ("seed", (1 << 64) - 1),
        ("seed", -(1 << 63)),
        ("presence_penalty", -2),
        ("repetition_penalty", 1e-3),
        ("max_tokens", 1),
        ("logprobs", 20),
    ],
)
def test_limits_themselves_are_fine(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        EngineRequest(request_id="a", prompt_ids=[])


def test_sequence_limit_is_the_smaller_of_request_and_context() -> None:
    def limit(max_tokens: int | None) -> int:
        request = EngineRequest(
            request_id="a", prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=max_tokens)
        )
        return Sequence(request, max_model_len=10).max_total_tokens

    assert (limit(None), limit(2), limit(100)) == (10, 5, 10)


def test_token_range_joins_prompt_and_output() -> None:
    sequence = Sequence(EngineRequest(request_id="a", prompt_ids=[1, 2, 3]), max_model_len=10)
    sequence.output_ids.extend([4, 5])
    tokens = [1, 2, 3, 4, 5]
    for start in range(5):
        for stop in range(start + 1, 6):
            assert list(sequence.token_range(start, stop)) == tokens[start:stop]


def test_own_seed_wins_over_the_drawn_one() -> None:
    request = EngineRequest(request_id="a", prompt_ids=[1], sampling=SamplingParams(seed=0))
    assert Sequence(request, max_model_len=4, seed=9).seed == 0
    other = EngineRequest(request_id="a", prompt_ids=[1])
    assert Sequence(other, max_model_len=4, seed=9).seed == 9


def test_final_states() -> None:
    final = {state for state in RequestState if state.is_final}
    assert final == {RequestState.FINISHED, RequestState.ABORTED}
