"""The whole model on the operators that inference chooses: golden logits, cuts, steps, windows.

These are the native kernels, and where the library is not built what `auto` prefers after them.
"""

import pytest
import torch

from moonlet.kernels import _native
from moonlet.kernels.registry import resolve
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from tests.golden_data import count_vectors
from tests.model import golden
from tests.model.golden import max_error

KDA_OPS = ("rms_norm", "gated_rms_norm", "short_conv", "kda_chunk", "kda_step")
IS_NATIVE = _native.availability()[0]


@pytest.fixture(scope="module", params=golden.FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[str, Transformer]:
    config = golden.shared_model(request.param).config
    kernels = resolve("cpu", config, is_inference=True)
    chosen = {kernels.backend(op) for op in KDA_OPS}
    assert chosen == ({"cpu"} if IS_NATIVE else {"reference", "torch"})
    return request.param, golden.model(request.param, kernels=kernels)


def test_prefill_logits(pair: tuple[str, Transformer]) -> None:
    family, transformer = pair
    vectors = golden.expected(family)
    for n in vectors.lengths("logits"):
        ids = vectors.tensors[f"len{n}.input_ids"].flatten()
        logits = golden.prefill(transformer, ids)
        expected = vectors.tensors[f"len{n}.logits"].view_as(logits)
        assert max_error(logits, expected) <= golden.LOGIT_TOLERANCE[family]
        count_vectors(1)


def test_a_prompt_cut_into_chunks_steps_and_windows_equals_one_piece(
    pair: tuple[str, Transformer],
) -> None:
    _, transformer = pair
    ids = torch.arange(60) * 37 % 500
    whole = golden.prefill(transformer, ids)
    state, rows, start = golden.fresh_state(transformer, 2), [], 0
    # length, and of a window the rows that are kept
    pieces = [(33, None), (1, None), (5, 3), (1, None), (4, 4), (7, 0), (1, None), (17, None)]
    for length, kept in pieces:
        meta = BatchMeta.build(
            [length],
            slots=[1],
            start_positions=[start],
            tentative=[kept is not None],
            logits="all",
        )
        with torch.inference_mode():
            logits = transformer.logits(transformer(ids[start : start + length], meta, state))
        if kept is not None:
            state.commit(meta, [kept])
        rows.append(logits[:kept])
        start += len(rows[-1])
    assert start == 60
    # logits of magnitude 10 after sums in another order
    assert (torch.cat(rows) - whole).abs().max() <= 2e-4
