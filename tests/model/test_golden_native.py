"""The golden logits on weights as stored, at every instruction-set level.

Where the native library is not built there are no levels, and the same vectors are held against the
reference operators that inference then chooses.
"""

import pytest
import torch

from moonlet.kernels import _native, _native_ops
from moonlet.model.transformer import Transformer
from moonlet.weights.checkpoint import load_for_inference
from tests.golden_data import count_vectors
from tests.model import golden
from tests.model.golden import FAMILIES, LOGIT_TOLERANCE, expected, max_error, prefill

LEVELS = _native.isa_levels()


@pytest.fixture(params=LEVELS or ["reference"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if LEVELS:
        monkeypatch.setattr(_native_ops, "level", lambda: LEVELS.index(request.param))
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest) -> tuple[str, Transformer]:
    model = load_for_inference(golden.checkpoint_dir(request.param)).model
    assert model.kernels.backend("linear") == ("cpu" if LEVELS else "reference")
    return request.param, model


def test_prefill_greedy_and_cuts(served: tuple[str, Transformer], level: str) -> None:
    family, model = served
    vectors, tolerance = expected(family).tensors, LOGIT_TOLERANCE[family]
    for n in golden.full_or_subset_lengths(family, "logits"):
        ids = vectors[f"len{n}.input_ids"]
        assert max_error(prefill(model, ids), vectors[f"len{n}.logits"]) <= tolerance
        state = golden.fresh_state(model)
        cut = max(1, n // 3)
        parts = [prefill(model, ids[:cut], state)]
        parts += [prefill(model, ids[cut:], state, cut)] if cut < n else []
        assert max_error(torch.cat(parts), vectors[f"len{n}.logits"]) <= tolerance
        count_vectors(1)
    for n in expected(family).lengths("greedy_ids"):
        greedy = vectors[f"len{n}.greedy_ids"]
        logits = golden.teacher_forced(model, vectors[f"len{n}.input_ids"], greedy)
        assert max_error(logits, vectors[f"len{n}.greedy_logits"]) <= tolerance
        assert torch.equal(logits[: len(greedy)].argmax(-1), greedy.long())
        count_vectors(1)
