"""Windows rolled back by replay: the state of plain decode and of snapshots, nothing left over."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError, ConfigError, ShapeError
from moonlet.engine.cache.arenas import KDAArena
from moonlet.engine.cache.state import PagedState, slot_bytes
from moonlet.kernels.kda import cpu as kda
from moonlet.kernels.kda_window import cpu as windows
from moonlet.kernels.short_conv import cpu as short_conv
from moonlet.model.state import BatchMeta, KDAWindow
from moonlet.model.transformer import Transformer
from moonlet.testing import assert_close, tiny_config, tiny_model
from tests.engine.test_state import (
    PAGE,
    kda_state,
    on_inference_operators,
    one_shot,
    poison,
    run,
    tokens_of,
)
from tests.kernels.conftest import level
from tests.kernels.native_cases import needs_native, same_bits

__all__ = ["level"]

ROUNDS = 200
MAX_LEN = 2600
# logits of the tiny model: a window's rows and plain decode rows go through products of different
# numbers of rows in all layers
LOGITS = 1e-4
# states of both strategies, each after its own rounding: steps against chunks, up to 6 rows a round
STATES = 2e-5


def state_of(config: ModelConfig, rollback: str, num_slots: int = 3) -> PagedState:
    """Poisoned memory for long sequences."""
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
        state.bind(slot, [slot + i * num_slots for i in range(per_sequence)])
    poison(state)
    return state


def poison_windows(state: PagedState) -> None:
    """Fill the buffers of closed windows with NaN."""
    for arena in state._kda.values():
        assert not arena.is_pending
        assert arena._rows is not None
        for buffer in arena._rows._buffers:
            buffer.fill_(torch.nan)


def model_of(kind: str, bound: float | None = -5.0) -> Transformer:
    config = tiny_config()
    model = tiny_model(replace(config, kda=replace(config.kda, gate_lower_bound=bound)))
    return model if kind == "reference" else on_inference_operators(model)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("kind", ["reference", "inference"])
def test_random_rounds_equal_snapshots(kind: str, bound: float | None) -> None:
    model, generator = model_of(kind, bound), random.Random(7)
    states = {name: state_of(model.config, name) for name in ("replay", "snapshot")}
    done, seen = dict.fromkeys((1, 2, 3), 0), set()
    for round_ in range(ROUNDS if kind == "inference" else 40):
        parts, tentative = {}, set()
        for slot in generator.sample([1, 2, 3], generator.randint(1, 3)):
            draft = generator.random() < 0.7 and done[slot] > 0
            length = generator.randint(1, 6) if draft else generator.choice([1, 1, 1, 2, 9])
            parts[slot] = (done[slot], tokens_of(round_ * 4 + slot, length))
            tentative |= {slot} if draft else set()
        kept = [
            generator.randint(0, len(tokens)) if slot in tentative else len(tokens)
            for slot, (_, tokens) in parts.items()
        ]
        kinds = {"window" if slot in tentative else len(parts[slot][1]) > 1 for slot in parts}
        seen.add(frozenset(kinds))
        logits = {}
        for name, state in states.items():
            meta, logits[name] = run(model, state, parts, tentative)
            if tentative:
                state.commit(meta, kept)
            state.check()
        for slot in parts:
            assert_close(logits["replay"][slot], logits["snapshot"][slot], atol=LOGITS)
        for slot, count in zip(parts, kept, strict=True):
            done[slot] += count
            if done[slot]:
                pair = [kda_state(state, slot) for state in states.values()]
                for replayed, snapshot in zip(*pair, strict=True):
                    assert_close(replayed, snapshot, atol=STATES)
        poison_windows(states["replay"])
    if kind == "inference":
        # windows, single rows and longer pieces of prompts met in every mixture
        mixtures = [{"window"}, {"window", True}, {"window", False}, {"window", True, False}]
        assert all(frozenset(mixture) in seen for mixture in mixtures)


@dataclass
class Layer:
    """One layer's parameters and random projections."""

    generator: torch.Generator
    heads: int = 2
    size: int = 16
    bound: float | None = -5.0

    def __post_init__(self) -> None:
        width = self.heads * self.size
        self.taps = [self.normal(width, 4) for _ in range(3)]
        self.gate = (self.normal(self.heads), self.normal(self.heads, self.size), self.bound)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rows(self, count: int) -> KDAWindow:
        heads = (self.heads, self.size)
        raw = self.normal(count, 3 * self.heads * self.size)
        z, beta = self.normal(count, *heads) * 3, self.normal(count, self.heads)
        return KDAWindow(raw, self.taps, z, beta, *self.gate)

    def decode(self, arena: KDAArena, slot: int, rows: KDAWindow) -> Tensor:
        """Plain decode steps of rows of one sequence."""
        outputs, slots = [], torch.tensor([slot])
        for t in range(len(rows.raw_EC)):
            y = short_conv.short_conv_step(rows.raw_EC[t : t + 1], self.taps, arena.conv_GCW, slots)
            qkv = [x.unflatten(-1, (self.heads, -1)) for x in y.chunk(3, dim=-1)]
            gates = (rows.z_EHK[t : t + 1], rows.beta_EH[t : t + 1], *self.gate)
            outputs.append(kda.kda_step(*qkv, *gates, arena.recurrent_GHKV, slots))
        return torch.cat(outputs)


def cut(rows: KDAWindow, first: int, last: int) -> KDAWindow:
    return rows._replace(
        raw_EC=rows.raw_EC[first:last],
        z_EHK=rows.z_EHK[first:last],
        beta_EH=rows.beta_EH[first:last],
    )


@needs_native
@pytest.mark.parametrize("bound", [-5.0, None])
def test_random_rounds_have_the_bits_of_plain_decode(level: str, bound: float | None) -> None:
    choose = random.Random(3)
    layer = Layer(torch.Generator().manual_seed(3), bound=bound)
    config = replace(tiny_config(), kda_layers=(0,))
    state, plain = state_of(config, "replay"), state_of(config, "replay")._kda[0]
    replayed, done = state._kda[0], dict.fromkeys((1, 2, 3), 0)
    for _ in range(ROUNDS):
        slots = choose.sample([1, 2, 3], choose.randint(1, 3))
        lens = [choose.randint(1, 9) for _ in slots]
        kept = [choose.randint(0, n) for n in lens]
        starts = [done[slot] for slot in slots]
        tentative = [True] * len(slots)
        meta = BatchMeta.build(lens, slots=slots, start_positions=starts, tentative=tentative)
        recurrent, conv, _ = replayed.in_place(meta)
        before = recurrent[slots].clone(), conv[slots].clone()
        held = replayed.keep(meta, layer.rows(sum(lens)), windows.kda_replay)
        rows = held._replace(
            raw_EC=held.raw_EC.clone(), z_EHK=held.z_EHK.clone(), beta_EH=held.beta_EH.clone()
        )
        o = windows.kda_window(*held, recurrent, conv, meta.slots_S, meta.ragged)
        assert same_bits(recurrent[slots], before[0])
        assert same_bits(conv[slots], before[1])
        state.commit(meta, kept)
        poison_windows(state)
        plain.in_place(meta)
        for first, slot, count in zip(meta.ragged.starts_S.tolist(), slots, kept, strict=True):
            if not count:
                continue
            expected = layer.decode(plain, slot, cut(rows, first, first + count))
            assert same_bits(o[first : first + count], expected)
            done[slot] += count
        # slots that no sequence has had yet are still poison in both
        assert same_bits(recurrent, plain.recurrent_GHKV)
        assert same_bits(conv, plain.conv_GCW)
    assert min(done.values()) > ROUNDS


@pytest.mark.parametrize("kind", ["reference", "inference"])
def test_discarded_windows_leave_state_and_tail(kind: str) -> None:
    model = model_of(kind)
    state, tokens = state_of(model.config, "replay"), tokens_of(31, 12)
    run(model, state, {1: (0, tokens[:5]), 2: (0, tokens[:2])})
    before = kda_state(state, 1)
    meta, _ = run(model, state, {1: (5, tokens_of(32, 4)), 2: (2, tokens[2:3])}, {1})
    state.discard()
    assert all(map(same_bits, kda_state(state, 1), before))
    with pytest.raises(ShapeError, match="without a tentative window"):
        state.commit(meta, [2, 0])
    poison_windows(state)
    after = run(model, state, {1: (5, tokens[5:])})[1][1]
    assert_close(after, one_shot(model, tokens)[5:], atol=LOGITS)


@pytest.mark.parametrize("kind", ["reference", "inference"])
def test_a_reused_slot_starts_cold(kind: str) -> None:
    model = model_of(kind)
    state = state_of(model.config, "replay")
    old, new = tokens_of(41, 12), tokens_of(42, 9)
    run(model, state, {1: (0, old[:3])})
    meta, _ = run(model, state, {1: (3, old[3:11])}, {1})
    state.commit(meta, [5])
    pages = state.pages_of(1)
    state.release(1)
    poison(state)
    poison_windows(state)
    state.bind(1, pages)
    # the new owner begins with a window, shorter than the old owner's
    meta, window = run(model, state, {1: (0, new[:2])}, {1})
    assert_close(window[1], one_shot(model, new[:2]), atol=LOGITS)
    state.commit(meta, [1])
    after = run(model, state, {1: (1, new[1:])})[1][1]
    assert_close(after, one_shot(model, new)[1:], atol=LOGITS)


def test_a_window_that_keeps_nothing_of_a_fresh_sequence(level: str) -> None:
    model, tokens = model_of("inference"), tokens_of(43, 6)
    state = state_of(model.config, "replay")
    meta, _ = run(model, state, {1: (0, tokens_of(44, 3))}, {1})
    state.commit(meta, [0])
    logits = run(model, state, {1: (0, tokens)})[1][1]
    assert_close(logits, one_shot(model, tokens), atol=LOGITS)


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_only_the_open_batch_can_be_settled(rollback: str) -> None:
    model = model_of("inference")
    state = state_of(model.config, rollback)
    parts = {1: (0, [1, 2, 3])}
    stale, _ = run(model, state, parts, {1})
    state.discard()
    meta, _ = run(model, state, parts, {1})
    with pytest.raises(ShapeError, match="not the open ones"):
        state.commit(stale, [2])
    with pytest.raises(CapacityError, match="window of 3"):
        state.commit(meta, [4])
    # a layer whose forward did not come to its windows: no layer is changed
    before = kda_state(state, 1)
    arenas = list(state._kda.values())
    arenas[-1].discard()
    with pytest.raises(ShapeError, match="without a tentative window"):
        state.commit(meta, [2])
    assert all(map(same_bits, kda_state(state, 1), before))


def test_buffers_grow_to_the_most_rows_of_one_batch() -> None:
    model = model_of("inference")
    state, config = state_of(model.config, "replay"), model.config
    width = config.kda.projection_size
    bytes_of_row = len(config.kda_layers) * (4 * width + config.kda.num_heads) * 4
    most = 0
    assert state.window_bytes == 0
    for lens in ([2], [1], [3, 4], [1, 1, 1], [7], [2, 2]):
        parts = {slot: (0, [1] * n) for slot, n in enumerate(lens, start=1)}
        addresses = [
            buffer.data_ptr() for arena in state._kda.values() for buffer in arena._rows._buffers
        ]
        meta, _ = run(model, state, parts, set(parts))
        state.commit(meta, [0] * len(lens))
        # a prompt beside a window takes no room
        meta, _ = run(model, state, {1: (0, [1] * 30), 2: (0, [1])}, {2})
        state.commit(meta, [0, 1])
        now = [
            buffer.data_ptr() for arena in state._kda.values() for buffer in arena._rows._buffers
        ]
        if sum(lens) <= most:
            assert now == addresses
        most = max(most, sum(lens))
        assert state.window_bytes == most * bytes_of_row


def test_bytes_of_an_open_snapshot() -> None:
    model = model_of("inference")
    state = state_of(model.config, "snapshot")
    meta, _ = run(model, state, {1: (0, [1, 2, 3]), 2: (0, [1, 2])}, {1, 2})
    assert state.window_bytes == 5 * slot_bytes(model.config, torch.float32)
    state.commit(meta, [3, 0])
    assert state.window_bytes == 0


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose replay or snapshot"):
        state_of(tiny_config(), "undo")


def test_a_snapshot_arena_takes_no_inputs() -> None:
    state = state_of(replace(tiny_config(), kda_layers=(0,)), "snapshot")
    meta = BatchMeta.build([2], slots=[1], tentative=[True])
    rows = Layer(torch.Generator().manual_seed(0)).rows(2)
    with pytest.raises(ShapeError, match="snapshot"):
        state._kda[0].keep(meta, rows, windows.kda_replay)
    replaying = state_of(replace(tiny_config(), kda_layers=(0,)), "replay")
    with pytest.raises(ShapeError, match="without windows"):
        replaying._kda[0].keep(BatchMeta.build([2], slots=[1]), rows, windows.kda_replay)
