"""Slots and pages against dense tensors: cuts, tentative windows, reuse, poisoned memory."""

import random

import pytest
import torch

from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError, ShapeError
from moonlet.engine.cache.arenas import KDAArena
from moonlet.engine.cache.blocks import NULL_BLOCK
from moonlet.engine.cache.state import PagedState, page_bytes, slot_bytes
from moonlet.engine.cache.windows import Rollback
from moonlet.kernels.registry import resolve
from moonlet.model.simple_state import DenseState
from moonlet.model.state import BatchMeta, ModelState
from moonlet.model.transformer import Transformer
from moonlet.testing import assert_close, assert_same_choice, tiny_config, tiny_model

PAGE = 4
MAX_LEN = 40


@pytest.fixture(scope="module", params=["training", "inference"])
def model(request: pytest.FixtureRequest) -> Transformer:
    """The tiny model on the operators of either purpose."""
    model = tiny_model()
    return model if request.param == "training" else on_inference_operators(model)


def on_inference_operators(model: Transformer) -> Transformer:
    kernels = resolve("cpu", model.config, is_inference=True)
    served = Transformer(model.config, kernels).eval()
    served.load_state_dict(model.state_dict())
    return served


def make_state(
    config: ModelConfig, num_slots: int = 3, rollback: Rollback = "replay"
) -> PagedState:
    """A state whose slot s owns the pages s, s + num_slots, s + 2 num_slots, ..."""
    per_sequence = -(-MAX_LEN // PAGE)
    state = PagedState(
        config,
        num_slots=num_slots,
        num_pages=num_slots * per_sequence,
        page_size=PAGE,
        max_model_len=MAX_LEN,
        rollback=rollback,
    )
    for slot in range(1, num_slots + 1):
        state.bind(slot, pages_for(slot, num_slots))
    return state


def pages_for(slot: int, num_slots: int = 3) -> list[int]:
    return [slot + i * num_slots for i in range(-(-MAX_LEN // PAGE))]


def poison(state: PagedState) -> None:
    """Fill everything but the null page with NaN."""
    for kda in state._kda.values():
        kda.recurrent_GHKV.fill_(torch.nan)
        kda.conv_GCW.fill_(torch.nan)
    for mla in state._mla.values():
        mla.pages_GLC[NULL_BLOCK + 1 :] = torch.nan


def run(
    model: Transformer,
    state: ModelState,
    parts: dict[int, tuple[int, list[int]]],
    tentative: set[int] = frozenset(),
) -> tuple[BatchMeta, dict[int, torch.Tensor]]:
    """Run {slot: (start, tokens)} in one batch; return the logits of all rows by slot."""
    meta = BatchMeta.build(
        [len(tokens) for _, tokens in parts.values()],
        slots=list(parts),
        start_positions=[start for start, _ in parts.values()],
        tentative=[slot in tentative for slot in parts],
        logits="all",
    )
    tokens = [token for _, tokens in parts.values() for token in tokens]
    with torch.inference_mode():
        logits = model.logits(model.forward(torch.tensor(tokens), meta, state))
    return meta, dict(zip(parts, logits.split(list(meta.seq_lens)), strict=True))


def tokens_of(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(512) for _ in range(length)]


def one_shot(model: Transformer, tokens: list[int]) -> torch.Tensor:
    state = DenseState(model.config, 1, MAX_LEN)
    return run(model, state, {0: (0, tokens)})[1][0]


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_in_any_company_equals_one_piece(model: Transformer, seed: int) -> None:
    generator = random.Random(seed)
    state = make_state(model.config)
    poison(state)
    sequences = {slot: tokens_of(seed * 10 + slot, 30) for slot in (1, 2, 3)}
    done = dict.fromkeys(sequences, 0)
    pieces: dict[int, list[torch.Tensor]] = {slot: [] for slot in sequences}
    while any(done[slot] < 30 for slot in sequences):
        open_slots = [slot for slot in sequences if done[slot] < 30]
        chosen = generator.sample(open_slots, generator.randint(1, len(open_slots)))
        parts = {}
        for slot in chosen:
            length = min(generator.choice([1, 1, 2, 3, 5, 9]), 30 - done[slot])
            parts[slot] = (done[slot], sequences[slot][done[slot] : done[slot] + length])
            done[slot] += length
        for slot, logits in run(model, state, parts)[1].items():
            pieces[slot].append(logits)
        state.check()
    for slot, tokens in sequences.items():
        assert_same_choice(torch.cat(pieces[slot]), one_shot(model, tokens))


def test_inference_operators_give_the_logits_of_the_reference() -> None:
    model = tiny_model()
    tokens = {1: tokens_of(21, 30), 2: tokens_of(22, 30), 3: tokens_of(23, 30)}
    first = {1: (0, tokens[1][:19]), 3: (0, tokens[3][:4])}
    # a decode row, a fresh prompt and a window over a short context in one batch
    mixed = {1: (19, tokens[1][19:20]), 2: (0, tokens[2]), 3: (4, tokens[3][4:9])}
    logits = []
    for candidate in (model, on_inference_operators(model)):
        state = make_state(model.config)
        poison(state)
        run(candidate, state, first)
        logits.append(run(candidate, state, mixed)[1])
    for slot, expected in logits[0].items():
        assert_same_choice(logits[1][slot], expected)


def kda_state(state: PagedState, slot: int) -> list[torch.Tensor]:
    return [
        tensor[slot].clone()
        for arena in state._kda.values()
        for tensor in (arena.recurrent_GHKV, arena.conv_GCW)
    ]


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("kept", range(6))
@pytest.mark.parametrize("prefix", [1, 2, 7])
def test_rejected_rows_leave_no_trace(
    model: Transformer, prefix: int, kept: int, rollback: Rollback
) -> None:
    tokens, drafts = tokens_of(1, 20), tokens_of(2, 5)
    drafts[:kept] = tokens[prefix : prefix + kept]
    neighbour = tokens_of(3, 20)

    state = make_state(model.config, rollback=rollback)
    run(model, state, {1: (0, tokens[:prefix]), 2: (0, neighbour[:6])})
    before = kda_state(state, 1)
    parts = {2: (6, neighbour[6:9]), 1: (prefix, drafts)}
    meta, window = run(model, state, parts, tentative={1})
    for now, then in zip(kda_state(state, 1), before, strict=True):
        assert torch.equal(now, then)
    state.commit(meta, [0, kept])
    state.check()

    clean = make_state(model.config)
    run(model, clean, {1: (0, tokens[:prefix]), 2: (0, neighbour[:6])})
    if kept:
        expected = run(model, clean, {1: (prefix, tokens[prefix : prefix + kept])})[1][1]
        assert_close(window[1][:kept], expected, atol=1e-4)
    for now, then in zip(kda_state(state, 1), kda_state(clean, 1), strict=True):
        assert_close(now, then, atol=0.0 if kept == 0 else 1e-5)

    # and the next tokens, in other company, are those of a run without any window
    rest = tokens[prefix + kept : prefix + kept + 8]
    after = run(model, state, {1: (prefix + kept, rest), 2: (9, neighbour[9:12])})[1]
    whole = one_shot(model, tokens[: prefix + kept + 8])
    assert_same_choice(after[1], whole[prefix + kept :])
    assert_same_choice(after[2], one_shot(model, neighbour[:12])[9:])


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("kept", [(2, 3), (0, 1), (4, 0)])
def test_two_windows_keep_their_own_counts(
    model: Transformer, kept: tuple[int, int], rollback: Rollback
) -> None:
    tokens = {1: tokens_of(11, 12), 3: tokens_of(13, 12)}
    neighbour = tokens_of(12, 12)
    state = make_state(model.config, rollback=rollback)
    run(model, state, {1: (0, tokens[1][:4]), 2: (0, neighbour[:4]), 3: (0, tokens[3][:4])})
    parts = {1: (4, tokens[1][4:8]), 2: (4, neighbour[4:6]), 3: (4, tokens[3][4:7])}
    meta, _ = run(model, state, parts, tentative={1, 3})
    state.commit(meta, [kept[0], 0, kept[1]])
    for slot, count in zip((1, 3), kept, strict=True):
        start = 4 + count
        after = run(model, state, {slot: (start, tokens[slot][start : start + 4])})[1][slot]
        assert_same_choice(after, one_shot(model, tokens[slot][: start + 4])[start:])
    after = run(model, state, {2: (6, neighbour[6:9])})[1][2]
    assert_same_choice(after, one_shot(model, neighbour[:9])[6:])


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_window_of_one_row(model: Transformer, rollback: Rollback) -> None:
    tokens = tokens_of(4, 8)
    state = make_state(model.config, rollback=rollback)
    run(model, state, {1: (0, tokens[:5])})
    for position in range(5, 8):
        meta, _ = run(model, state, {1: (position, tokens[position : position + 1])}, {1})
        state.commit(meta, [1])
    after = run(model, state, {1: (8, [3])})[1][1]
    assert_same_choice(after, one_shot(model, [*tokens, 3])[8:])


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_commit_outside_the_window_changes_nothing(model: Transformer, rollback: Rollback) -> None:
    state = make_state(model.config, rollback=rollback)
    meta, _ = run(model, state, {1: (0, [1, 2, 3])}, tentative={1})
    for count in (-1, 4):
        with pytest.raises(CapacityError, match="window of 3"):
            state.commit(meta, [count])
    state.commit(meta, [2])


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_open_window_must_be_settled_first(model: Transformer, rollback: Rollback) -> None:
    state = make_state(model.config, rollback=rollback)
    meta, _ = run(model, state, {1: (0, [1, 2, 3])}, tentative={1})
    with pytest.raises(ShapeError, match="neither committed nor discarded"):
        run(model, state, {2: (0, [1])})
    with pytest.raises(AssertionError, match="still open"):
        state.check()
    state.discard()
    state.check()
    with pytest.raises(ShapeError, match="without a tentative window"):
        state.commit(meta, [1])


def test_reused_slot_and_pages_start_clean(model: Transformer) -> None:
    state = make_state(model.config)
    tokens = tokens_of(5, 12)
    expected = one_shot(model, tokens)
    for round_ in range(3):
        poison(state)
        state.release(1)
        state.bind(1, pages_for(1)[:3] if round_ % 2 else pages_for(1))
        actual = torch.cat(
            [
                run(model, state, {1: (0, tokens[:5])})[1][1],
                run(model, state, {1: (5, tokens[5:])})[1][1],
            ]
        )
        assert_close(actual, expected, atol=1e-4)


def test_a_decode_batch_moves_no_state(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(model.config)
    poison(state)
    tokens = tokens_of(8, 6)
    run(model, state, {1: (0, tokens[:5])})
    monkeypatch.setattr(KDAArena, "load", None)
    addresses = [arena.recurrent_GHKV.data_ptr() for arena in state._kda.values()]
    # slot 3 starts with this step, slot 2 stays poisoned
    logits = run(model, state, {3: (0, tokens[:1]), 1: (5, tokens[5:])})[1]
    assert_close(logits[1], one_shot(model, tokens)[5:], atol=1e-4)
    assert_close(logits[3], one_shot(model, tokens[:1]), atol=1e-4)
    for arena, address in zip(state._kda.values(), addresses, strict=True):
        assert arena.recurrent_GHKV.data_ptr() == address
        assert bool(arena.recurrent_GHKV[2].isnan().all())
        assert bool(arena.recurrent_GHKV[[1, 3]].isfinite().all())


def test_short_sequence_never_sees_a_stale_page(model: Transformer) -> None:
    # a long neighbour pads the short one's context over pages it owns but has not written
    state = make_state(model.config)
    poison(state)
    short, long = tokens_of(6, 3), tokens_of(7, 30)
    logits = run(model, state, {1: (0, short), 2: (0, long)})[1]
    assert_close(logits[1], one_shot(model, short), atol=1e-4)
    step = run(model, state, {1: (3, [9]), 2: (30, [9])})[1]
    assert_close(step[1], one_shot(model, [*short, 9])[3:], atol=1e-4)


def test_row_beyond_the_bound_pages_is_refused(model: Transformer) -> None:
    state = make_state(model.config)
    state.bind(1, [1])
    run(model, state, {1: (0, [1, 2, 3, 4])})
    with pytest.raises(ShapeError, match="beyond the pages"):
        run(model, state, {1: (4, [5])})


def test_bytes_are_those_of_the_arenas() -> None:
    config = tiny_config()
    state = make_state(config)
    kda = sum(
        tensor[1:].nbytes for a in state._kda.values() for tensor in (a.recurrent_GHKV, a.conv_GCW)
    )
    mla = sum(arena.pages_GLC[1:].nbytes for arena in state._mla.values())
    assert kda == 3 * slot_bytes(config, torch.float32)
    assert mla == state.num_pages * page_bytes(config, PAGE, torch.float32)
    assert state.num_bytes == kda + mla
