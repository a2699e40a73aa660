"""When a sequence ends."""

import pytest

from moonlet.engine.request import EngineRequest, SamplingParams, Sequence
from moonlet.engine.stopping import finish_after

STOPS = frozenset({2, 9})


def after(ids: list[int], **params: object) -> str | None:
    request = EngineRequest(request_id="a", prompt_ids=[1], sampling=SamplingParams(**params))
    sequence = Sequence(request, max_model_len=6)
    sequence.output_ids.extend(ids)
    return finish_after(sequence, ids[-1], STOPS)


@pytest.mark.parametrize(
    ("ids", "params", "expected"),
    [
        ([5], {}, None),
        ([5, 2], {}, "stop"),
        ([9], {}, "stop"),
        ([9], {"ignore_eos": True}, None),
        ([7], {"stop_token_ids": frozenset({7})}, "stop"),
        ([7], {"stop_token_ids": frozenset({7}), "ignore_eos": True}, "stop"),
        ([5, 5], {"max_tokens": 2}, "length"),
        ([5], {"max_tokens": 1}, "length"),
        ([5, 2], {"max_tokens": 2}, "stop"),
        ([5] * 4, {}, None),
        ([5] * 5, {}, "length"),
        ([2] * 5, {"ignore_eos": True}, "length"),
    ],
)
def test_finish_after(ids: list[int], params: dict[str, object], expected: str | None) -> None:
    assert after(ids, **params) == expected
