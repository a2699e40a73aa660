"""Ragged batches and explicit state: cuts, slots, tentative rows, checks."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from moonlet.core.errors import CapacityError, ShapeError
from moonlet.model.simple_state import DenseState, NoState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from tests.model import golden

IDS = torch.arange(40) * 37 % 500


def run(transformer: Transformer, ids: Tensor, meta: BatchMeta, state: DenseState) -> Tensor:
    with torch.no_grad():
        return transformer.logits(transformer(ids, meta, state))


@pytest.fixture(scope="module", params=golden.FAMILIES)
def transformer(request: pytest.FixtureRequest) -> Transformer:
    return golden.shared_model(request.param)


def snapshot(state: DenseState, slot: int, n: int) -> list[Tensor]:
    parts = [t for k in state.kda_layers.values() for t in (k.recurrent[slot], k.conv[slot])]
    parts += [m.rows_GLC[slot, :n] for m in state.mla_layers.values()]
    return [p.clone() for p in parts]


def close(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max() <= 1e-4


@given(cuts=st.sets(st.integers(1, 39), max_size=6))
@settings(max_examples=15)
def test_any_cuts_give_the_whole(cuts: set[int]) -> None:
    transformer = golden.shared_model("tiny_k3")
    whole = golden.prefill(transformer, IDS)
    state, borders = golden.fresh_state(transformer), [0, *sorted(cuts), 40]
    parts = [golden.prefill(transformer, IDS[a:b], state, a) for a, b in pairwise(borders)]
    assert (torch.cat(parts) - whole).abs().max() <= 2e-4


def test_token_by_token_gives_the_whole(transformer: Transformer) -> None:
    whole = golden.prefill(transformer, IDS)
    state = golden.fresh_state(transformer)
    rows = [golden.prefill(transformer, IDS[t : t + 1], state, t) for t in range(40)]
    assert (torch.cat(rows) - whole).abs().max() <= 2e-4


def test_mixed_batch_of_decode_chunk_and_fresh_rows(transformer: Transformer) -> None:
    whole = golden.prefill(transformer, IDS)
    state = golden.fresh_state(transformer, 3)
    golden_rows = BatchMeta.build([9, 20], slots=[2, 0])
    run(transformer, torch.cat([IDS[:9], IDS[:20]]), golden_rows, state)
    mixed = BatchMeta.build([1, 6, 5], slots=[2, 0, 1], start_positions=[9, 20, 0], logits="all")
    assert mixed.is_decode == (True, False, False)
    ids = torch.cat([IDS[9:10], IDS[20:26], IDS[:5]])
    logits = run(transformer, ids, mixed, state)
    wanted = torch.cat([whole[9:10], whole[20:26], whole[:5]])
    assert (logits - wanted).abs().max() <= 2e-4


def test_a_slot_reused_from_position_zero_starts_clean(transformer: Transformer) -> None:
    state = golden.fresh_state(transformer)
    for layer in state.kda_layers.values():
        layer.recurrent.fill_(torch.nan)
        layer.conv.fill_(torch.nan)
    logits = golden.prefill(transformer, IDS[:6], state)
    assert (logits - golden.prefill(transformer, IDS[:6])).abs().max() <= 1e-5


@pytest.mark.parametrize("kept", [0, 1, 3, 5])
def test_rejected_rows_leave_no_trace(transformer: Transformer, kept: int) -> None:
    state, clean = golden.fresh_state(transformer), golden.fresh_state(transformer)
    golden.prefill(transformer, IDS[:10], state)
    golden.prefill(transformer, IDS[:10], clean)
    if kept:
        golden.prefill(transformer, IDS[10 : 10 + kept], clean, 10)
    window = BatchMeta.build([5], start_positions=[10], tentative=[True], logits="all")
    before = snapshot(state, 0, 10)
    logits = run(transformer, IDS[10:15], window, state)
    whole = golden.prefill(transformer, IDS[:15])
    assert (logits - whole[10:]).abs().max() <= 2e-4
    close(before, snapshot(state, 0, 10))
    state.commit(window, [kept])
    close(snapshot(state, 0, 10 + kept), snapshot(clean, 0, 10 + kept))
    after = [golden.prefill(transformer, IDS[20:21], s, 10 + kept) for s in (state, clean)]
    assert (after[0] - after[1]).abs().max() <= 1e-4


def test_window_beside_plain_decode_commits_only_itself(transformer: Transformer) -> None:
    state = golden.fresh_state(transformer, 2)
    run(transformer, torch.cat([IDS[:4], IDS[:8]]), BatchMeta.build([4, 8]), state)
    meta = BatchMeta.build([1, 3], start_positions=[4, 8], tentative=[False, True], logits="all")
    logits = run(transformer, torch.cat([IDS[4:5], IDS[8:11]]), meta, state)
    state.commit(meta, [0, 2])
    whole = golden.prefill(transformer, IDS)
    assert (logits - torch.cat([whole[4:5], whole[8:11]])).abs().max() <= 2e-4
    clean = golden.fresh_state(transformer, 2)
    run(transformer, torch.cat([IDS[:5], IDS[:10]]), BatchMeta.build([5, 10]), clean)
    for slot, n in ((0, 5), (1, 10)):
        close(snapshot(state, slot, n), snapshot(clean, slot, n))


def test_commit_refuses_more_rows_than_the_window(transformer: Transformer) -> None:
    state = golden.fresh_state(transformer)
    window = BatchMeta.build([3], tentative=[True])
    run(transformer, IDS[:3], window, state)
    with pytest.raises(CapacityError, match="commit 4 rows of a window of 3"):
        state.commit(window, [4])


def test_states_refuse_what_they_cannot_hold(transformer: Transformer) -> None:
    too_long = BatchMeta.build([3], start_positions=[golden.MAX_LEN - 2])
    with pytest.raises(CapacityError, match=f"{golden.MAX_LEN + 1} rows does not fit"):
        run(transformer, IDS[:3], too_long, golden.fresh_state(transformer))
    continued = BatchMeta.build([1], start_positions=[4])
    with pytest.raises(ShapeError, match="cannot continue"):
        transformer(IDS[:1], continued, NoState(transformer.config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_lens": [2, 2], "slots": [1, 1]}, "repeat"),
        ({"seq_lens": [2], "is_decode": [True]}, "exactly one row"),
        ({"seq_lens": [2, 3], "start_positions": [0]}, "other lengths"),
        ({"seq_lens": []}, "at least one row"),
    ],
)
def test_impossible_batches_are_refused(options: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        BatchMeta.build(**options)


def test_a_step_updates_its_slots_where_they_lie(
    transformer: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = golden.prefill(transformer, IDS[:8])
    state = golden.fresh_state(transformer, 4)
    run(transformer, IDS[:7], BatchMeta.build([7], slots=[2]), state)
    layers = list(state.kda_layers.values())
    for layer in layers:
        # slot 3 starts now: what it holds is void; slots 0 and 1 are nobody's
        layer.recurrent[3] = torch.nan
        monkeypatch.setattr(layer, "load", None)
    before = [(layer.recurrent.data_ptr(), layer.recurrent[:2].clone()) for layer in layers]
    step = BatchMeta.build([1, 1], slots=[3, 2], start_positions=[0, 7], logits="all")
    logits = run(transformer, IDS[[0, 7]], step, state)
    assert (logits - whole[[0, 7]]).abs().max() <= 2e-4
    for layer, (address, others) in zip(layers, before, strict=True):
        assert layer.recurrent.data_ptr() == address
        assert torch.equal(layer.recurrent[:2], others)


@pytest.mark.parametrize("lens", [[7, 1, 20], [1, 1, 1]])
def test_training_gradients_do_not_depend_on_packing(lens: list[int]) -> None:
    transformer = golden.model("tiny_k3")
    grads = []
    packed = BatchMeta.build(lens, logits="all")
    for metas in ([(IDS[: sum(lens)], packed)], separate(lens)):
        transformer.zero_grad()
        for ids, meta in metas:
            hidden = transformer(ids, meta, NoState(transformer.config))
            transformer.logits(hidden).square().sum().backward()
        grads.append({n: p.grad for n, p in transformer.named_parameters()})
    unused = {n for n, g in grads[0].items() if g is None}
    assert unused == {
        "layers.0.self_attention_res_norm.weight",
        "layers.0.self_attention_res_proj.weight",
    }
    for name, gradient in grads[0].items():
        if gradient is not None:
            other = grads[1][name]
            assert (gradient - other).norm() <= 1e-4 * other.norm() + 1e-6, name


def separate(lens: list[int]) -> list[tuple[Tensor, BatchMeta]]:
    parts, start = [], 0
    for n in lens:
        parts.append((IDS[start : start + n], BatchMeta.build([n], logits="all")))
        start += n
    return parts
