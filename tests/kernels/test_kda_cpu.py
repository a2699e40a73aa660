"""Native KDA for inference against the equations in float64, in values and in effects."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moonlet.core.errors import BackendError, ShapeError
from moonlet.kernels.kda import cpu, reference
from moonlet.kernels.ragged import Ragged
from tests.kernels.native_cases import (
    KDACase,
    error,
    gate_logit,
    kda_case,
    needs_native,
    recurrence64,
    same_bits,
)

pytestmark = needs_native

BOUNDS = [-5.0, -1.0, None]
# float32 sums of 16 to 256 products of magnitude 1: some units of the last place; errors measured
# up to 6e-7
CLOSE = 1e-6


def chunk(case: KDACase, emit: Tensor | None = None) -> reference.KDAResult:
    return cpu.kda_chunk(*case.inputs, case.bound, case.state, case.ragged, emit)


def steps(case: KDACase) -> tuple[Tensor, Tensor]:
    """One sequence token by token, its state in slot 1 of an arena of poison."""
    arena = torch.full((3, *case.state.shape[1:]), torch.nan)
    arena[1] = case.state[0]
    slot = torch.tensor([1])
    outputs = [
        cpu.kda_step(*case.rows(t, t + 1), case.bound, arena, slot)
        for t in range(case.ragged.num_rows)
    ]
    assert arena[[0, 2]].isnan().all()
    return torch.cat(outputs), arena[1:2].clone()


def last_rows(ragged: Ragged) -> Tensor:
    return ragged.borders_S1[1:] - 1


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("lens", [[1], [16], [37], [64], [5, 1, 70, 33, 1]])
def test_output_and_states(level: str, lens: list[int], bound: float | None) -> None:
    case = kda_case(lens, bound)
    before = [x.clone() for x in (*case.inputs, case.state)]
    rows = case.ragged.num_rows
    # unsorted, repeated, at borders of chunks (32 rows) and inside
    emit = torch.tensor([rows - 1, 0, rows // 2, 0, rows // 3])
    exact_o, exact_states = recurrence64(case)
    result = chunk(case, emit)
    assert error(result.o_THV, exact_o) <= CLOSE
    assert error(result.state_SHKV, exact_states[last_rows(case.ragged)]) <= CLOSE
    assert result.emitted_EHKV is not None
    assert error(result.emitted_EHKV, exact_states[emit]) <= CLOSE
    for now, then in zip((*case.inputs, case.state), before, strict=True):
        assert same_bits(now, then)


@pytest.mark.parametrize(("key", "value"), [(16, 16), (16, 256), (80, 48), (128, 128), (256, 240)])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_head_sizes(level: str, key: int, value: int, bound: float | None) -> None:
    case = kda_case([40], bound, heads=1, key=key, value=value)
    exact_o, exact_states = recurrence64(case)
    result, (o, state) = chunk(case), steps(case)
    for seen_o, seen_state in ((result.o_THV, result.state_SHKV), (o, state)):
        assert error(seen_o, exact_o) <= CLOSE
        assert error(seen_state, exact_states[-1:]) <= CLOSE


@pytest.mark.parametrize("bound", BOUNDS)
def test_cut_anywhere_equals_one_piece_equals_token_by_token(
    level: str, bound: float | None
) -> None:
    case = kda_case([100], bound)
    whole = chunk(case)
    for cut in (1, 15, 16, 17, 31, 32, 33, 64, 99):
        state, outputs = case.state, []
        for first, last in ((0, cut), (cut, 100)):
            ragged = Ragged.build([last - first])
            part = cpu.kda_chunk(*case.rows(first, last), bound, state, ragged)
            state = part.state_SHKV
            outputs.append(part.o_THV)
        assert error(torch.cat(outputs), whole.o_THV) <= CLOSE
        assert error(state, whole.state_SHKV) <= CLOSE
    o, state = steps(case)
    assert error(o, whole.o_THV) <= CLOSE
    assert error(state, whole.state_SHKV) <= CLOSE


@pytest.mark.parametrize("bound", [-5.0, None])
def test_emitted_states_continue_and_change_nothing(level: str, bound: float | None) -> None:
    case = kda_case([70, 33], bound)
    plain = chunk(case)
    emit = torch.tensor([0, 15, 16, 30, 31, 32, 33, 63, 64, 69, 70, 101, 102])
    result = chunk(case, emit)
    assert same_bits(result.o_THV, plain.o_THV)
    assert same_bits(result.state_SHKV, plain.state_SHKV)
    assert result.emitted_EHKV is not None
    # a sequence's last row leaves the final state itself
    assert same_bits(result.emitted_EHKV[[9, 12]], plain.state_SHKV)
    for row, state in zip(emit.tolist(), result.emitted_EHKV, strict=True):
        end = 70 if row < 70 else 103
        if row + 1 < end:
            ragged = Ragged.build([end - row - 1])
            rest = cpu.kda_chunk(*case.rows(row + 1, end), bound, state[None], ragged)
            assert error(rest.o_THV, plain.o_THV[row + 1 : end]) <= CLOSE
    empty = chunk(case, torch.zeros(0, dtype=torch.int64))
    assert empty.emitted_EHKV is not None
    assert empty.emitted_EHKV.shape == (0, *case.state.shape[1:])


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_step_changes_its_slots_only(level: str, bound: float | None) -> None:
    case = kda_case([1] * 5, bound)
    arena = torch.full((9, *case.state.shape[1:]), torch.nan)
    slots = torch.tensor([7, 0, 3, 2, 8])
    arena[slots] = case.state
    address = arena.data_ptr()
    o = cpu.kda_step(*case.inputs, bound, arena, slots)
    exact_o, exact_states = recurrence64(case)
    assert error(o, exact_o) <= CLOSE
    assert error(arena[slots], exact_states) <= CLOSE
    assert arena.data_ptr() == address
    assert arena[[1, 4, 5, 6]].isnan().all()


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("lead", [0, 7, 20])
def test_gates_at_their_limit_and_then_open(level: str, bound: float | None, lead: int) -> None:
    case = kda_case([lead + 60], bound)
    z = case.inputs[3]
    # thirty steps of e^-5 (or of e^-300) reach far below the smallest float32, then nothing decays
    z[lead : lead + 30] = 100.0 if bound else 300.0
    z[lead + 30 :] = -100.0
    exact_o, exact_states = recurrence64(case)
    result, (o, state) = chunk(case), steps(case)
    for seen_o, seen_state in ((result.o_THV, result.state_SHKV), (o, state)):
        assert error(seen_o, exact_o) <= CLOSE
        assert error(seen_state, exact_states[-1:]) <= CLOSE


@pytest.mark.parametrize("bound", [-5.0, None])
def test_near_parallel_keys_written_at_full_strength(level: str, bound: float | None) -> None:
    case = kda_case([96], bound)
    case.inputs[1] = torch.ones_like(case.inputs[1]) + 1e-3 * case.inputs[1]
    case.inputs[3] = case.inputs[3] - 30.0
    case.inputs[4] = torch.full_like(case.inputs[4], 8.0)
    exact_o, exact_states = recurrence64(case)
    result, (o, state) = chunk(case), steps(case)
    for seen_o, seen_state in ((result.o_THV, result.state_SHKV), (o, state)):
        assert error(seen_o, exact_o) <= CLOSE
        assert error(seen_state, exact_states[-1:]) <= CLOSE


@pytest.mark.parametrize("strength", [-80.0, 0.0])
def test_slow_decay_over_four_thousand_tokens(
    level: str, strength: float, record_property: Callable[[str, object], None]
) -> None:
    rows = 4000
    case = kda_case([rows], -5.0, heads=1, key=16, value=16)
    case.inputs[3].fill_(gate_logit(torch.tensor(0.9995).log().item(), -5.0))
    case.inputs[4].fill_(strength)
    case.inputs[5].zero_()
    case.inputs[6].zero_()
    exact_o, exact_states = recurrence64(case)
    result, (o, state) = chunk(case), steps(case)
    errors = {
        "chunk": max(error(result.o_THV, exact_o), error(result.state_SHKV, exact_states[-1:])),
        "step": max(error(o, exact_o), error(state, exact_states[-1:])),
    }
    record_property("errors", errors)
    # a chunk rounds its decay once; a step rounds each, by at most 3e-8 and always the same way
    assert errors["chunk"] <= 5e-6
    assert errors["step"] <= 1.2e-4


def state_updates(run: reference.KDAResult, before: Tensor) -> float:
    return float(before.max() - run.state_SHKV.max()) / 4


def test_the_state_is_updated_once_per_chunk(level: str) -> None:
    # Without decay each row takes 0.08 from a state of 2^26, whose neighbours are 4 apart: a row
    # alone is lost to rounding, and so are 16 rows, while 32 rows together move the state by
    # exactly one step of 4. The final state counts the roundings, which are the updates.
    case = kda_case([640], None, heads=1, key=16, value=16)
    key = torch.zeros(640, 1, 16)
    key[..., 0] = 1.0
    state = torch.zeros(1, 1, 16, 16)
    state[:, :, 0] = 2.0**26
    case.inputs[1], case.inputs[2] = key, torch.zeros(640, 1, 16)
    case.inputs[3].fill_(-200.0)
    case.inputs[4].fill_(torch.logit(torch.tensor(0.08 / 2.0**26, dtype=torch.float64)).item())
    counted = KDACase(case.inputs, None, state, case.ragged)
    by_token = reference.kda_chunk(*counted.inputs, None, state, counted.ragged)
    assert state_updates(by_token, state) == 0
    assert state_updates(chunk(counted), state) == 640 / 32


def test_rows_may_lie_apart(level: str) -> None:
    case = kda_case([3, 40], -5.0, key=32, value=32)
    packed = torch.cat([x.flatten(1) for x in case.inputs[:3]], dim=1)
    apart = [x.unflatten(-1, (2, 32)) for x in packed.chunk(3, dim=1)]
    assert not apart[0].is_contiguous()
    moved = KDACase([*apart, *case.inputs[3:]], case.bound, case.state, case.ragged)
    for seen, expected in zip(chunk(moved)[:2], chunk(case)[:2], strict=True):
        assert same_bits(seen, expected)
    # nothing of this layout can be read in place
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.inputs[:3]]
    moved = KDACase([*turned, *case.inputs[3:]], case.bound, case.state, case.ragged)
    assert same_bits(chunk(moved).o_THV, chunk(case).o_THV)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_threads_do_not_change_a_bit(
    level: str, bound: float | None, thread_counts: list[int]
) -> None:
    case = kda_case([40, 1, 70], bound, heads=5, key=64, value=64)
    step = kda_case([1] * 9, bound, heads=5, key=64, value=64)
    seen = []
    for count in thread_counts:
        torch.set_num_threads(count)
        arena = step.state.clone()
        o = cpu.kda_step(*step.inputs, bound, arena, torch.arange(9))
        seen.append([*chunk(case, torch.tensor([110, 3, 50])), o, arena])
    for other in seen[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, seen[0], strict=True))


def test_the_callers_treatment_of_subnormals_neither_matters_nor_changes(level: str) -> None:
    case = kda_case([18], -5.0)
    case.inputs[3].fill_(100.0)
    case.inputs[4].fill_(-200.0)
    # 18 steps of e^-5 take 1 to 8e-40: nothing, where subnormal numbers count as nothing
    case.state.fill_(0.5)
    tiny = torch.tensor([1e-39])
    expected = [*chunk(case)[:2], *steps(case)]
    assert (tiny * 0.5).item() > 0
    assert torch.set_flush_denormal(True)
    try:
        flushed = [*chunk(case)[:2], *steps(case)]
        assert (tiny * 0.5).item() == 0
    finally:
        torch.set_flush_denormal(False)
    for seen, wanted in zip(flushed, expected, strict=True):
        assert same_bits(seen, wanted)


def test_short_and_empty_rows_reach_the_unit_length_as_the_epsilon_allows(level: str) -> None:
    case = kda_case([20], -5.0)
    # squared lengths around the epsilon of 1e-6, and none at all
    case.inputs[0].mul_(2e-4)
    case.inputs[1].mul_(2e-4)
    case.inputs[0][3], case.inputs[1][5] = 0.0, 0.0
    exact_o, exact_states = recurrence64(case)
    result, (o, state) = chunk(case), steps(case)
    for seen_o, seen_state in ((result.o_THV, result.state_SHKV), (o, state)):
        assert error(seen_o, exact_o) <= CLOSE
        assert error(seen_state, exact_states[-1:]) <= CLOSE


def test_what_cannot_be_served_is_refused_and_changes_nothing() -> None:
    case = kda_case([4], -5.0)
    call = cpu.kda_chunk
    with pytest.raises(ShapeError, match="multiples of 16 up to 256"):
        chunk(kda_case([4], -5.0, key=24))
    with pytest.raises(ShapeError, match="multiples of 16 up to 256"):
        chunk(kda_case([1], -5.0, value=272))
    with pytest.raises(ShapeError, match="must be negative"):
        call(*case.inputs, 0.5, case.state, case.ragged)
    with pytest.raises(ShapeError, match="k has dtype"):
        call(
            case.inputs[0], case.inputs[1].double(), *case.inputs[2:], -5.0, case.state, case.ragged
        )
    with pytest.raises(ShapeError, match="beta has shape"):
        call(
            *case.rows(0, 3)[:4],
            case.inputs[4],
            *case.inputs[5:],
            -5.0,
            case.state,
            Ragged.build([3]),
        )
    for row in (-1, 4):
        with pytest.raises(ShapeError, match="outside the batch of 4"):
            chunk(case, torch.tensor([0, row]))
    arena, one = torch.ones(2, *case.state.shape[1:]), case.rows(0, 1)
    for slot in (-1, 2):
        with pytest.raises(BackendError, match="status 1"):
            cpu.kda_step(*one, -5.0, arena, torch.tensor([slot]))
    with pytest.raises(ShapeError, match="contiguous"):
        cpu.kda_step(
            *one, -5.0, arena.transpose(2, 3).contiguous().transpose(2, 3), torch.tensor([0])
        )
    assert bool((arena == 1).all())
