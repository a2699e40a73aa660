"""Windows of KDA against plain decode steps: outputs without a trace, states after any row."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moonlet.core.errors import BackendError, ShapeError
from moonlet.kernels.kda import cpu as kda
from moonlet.kernels.kda_window import cpu, reference
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.short_conv import cpu as short_conv
from tests.kernels.native_cases import (
    error,
    gate_logit,
    kda_case,
    needs_native,
    same_bits,
)

pytestmark = needs_native

BOUNDS = [-5.0, None]
# float32 recurrences of some tens of rows whose sums are ordered differently
CLOSE = 2e-6


@dataclass(frozen=True)
class Windows:
    """Projected inputs of some windows in the operators' order, arenas, slots, borders."""

    inputs: tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor, Tensor, float | None]
    state: Tensor
    conv: Tensor
    slots: Tensor
    ragged: Ragged

    def memory(self) -> tuple[Tensor, Tensor]:
        """Fresh copies of the arenas."""
        return self.state.clone(), self.conv.clone()


def windows(
    lens: list[int],
    bound: float | None,
    *,
    heads: int = 2,
    key: int = 32,
    value: int = 48,
    taps: int = 4,
    seed: int = 0,
) -> Windows:
    """Windows whose memory lies scattered in arenas of poison."""
    case = kda_case(lens, bound, heads, key, value, seed)
    _, _, _, z, beta, a_log, dt_bias = case.inputs
    generator = torch.Generator().manual_seed(seed + 1)
    widths = [heads * key, heads * key, heads * value]
    raw = torch.randn(sum(lens), sum(widths), generator=generator)
    weights = [torch.randn(width, taps, generator=generator) for width in widths]
    num_slots = len(lens) + 3
    slots = torch.randperm(num_slots, generator=generator)[: len(lens)]
    state = torch.full((num_slots, heads, key, value), torch.nan)
    conv = torch.full((num_slots, sum(widths), taps - 1), torch.nan)
    state[slots] = case.state
    conv[slots] = torch.randn(len(lens), *conv.shape[1:], generator=generator)
    inputs = (raw, weights, z, beta, a_log, dt_bias, bound)
    return Windows(inputs, state, conv, slots, case.ragged)


def decode(case: Windows, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Plain decode steps of the first rows; rows that do not run have no output (NaN)."""
    raw, weights, z, beta, *gates = case.inputs
    state, conv = case.memory()
    heads, value = state.shape[1], state.shape[3]
    widths = [w.shape[0] for w in weights]
    o = torch.full((case.ragged.num_rows, heads, value), torch.nan)
    for s, (start, count) in enumerate(zip(case.ragged.starts_S.tolist(), counts, strict=True)):
        slot = case.slots[s : s + 1]
        for t in range(start, start + count):
            y = short_conv.short_conv_step(raw[t : t + 1], [torch.cat(weights)], conv, slot)
            qkv = [x.unflatten(-1, (heads, -1)) for x in y.split(widths, dim=-1)]
            o[t : t + 1] = kda.kda_step(*qkv, z[t : t + 1], beta[t : t + 1], *gates, state, slot)
    return o, state, conv


def random_counts(ragged: Ragged, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(0, n + 1, (1,), generator=generator)) for n in ragged.seq_lens]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("lens", [[1], [8, 1, 3, 2], [17, 5, 40, 16], [33]])
def test_outputs_are_those_of_decode_and_leave_no_trace(
    level: str, lens: list[int], bound: float | None
) -> None:
    case = windows(lens, bound)
    state, conv = case.memory()
    before = [x.clone() for x in (case.inputs[0], *case.inputs[2:6])]
    o = cpu.kda_window(*case.inputs, state, conv, case.slots, case.ragged)
    expected, _, _ = decode(case, lens)
    assert same_bits(o, expected)
    assert same_bits(state, case.state)
    assert same_bits(conv, case.conv)
    for now, then in zip((case.inputs[0], *case.inputs[2:6]), before, strict=True):
        assert same_bits(now, then)
    slow = reference.kda_window(*case.inputs, state, conv, case.slots, case.ragged)
    assert error(o, slow) <= CLOSE
    assert same_bits(state, case.state)
    assert same_bits(conv, case.conv)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("length", [1, 2, 3, 8, 17, 33])
def test_every_count_leaves_the_state_of_decode(
    level: str, length: int, bound: float | None
) -> None:
    case = windows([length, 4], bound)
    for count in range(length + 1):
        counts = [count, count % 5]
        state, conv = case.memory()
        cpu.kda_replay(*case.inputs, state, conv, case.slots, case.ragged, torch.tensor(counts))
        _, expected, carry = decode(case, counts)
        # the poison of other slots included
        assert same_bits(state, expected)
        assert same_bits(conv, carry)
        slow_state, slow_conv = case.memory()
        reference.kda_replay(
            *case.inputs, slow_state, slow_conv, case.slots, case.ragged, torch.tensor(counts)
        )
        assert same_bits(slow_conv, carry)
        assert error(state[case.slots], slow_state[case.slots]) <= CLOSE
        untouched = [s for s, kept in enumerate(counts) if kept == 0]
        assert same_bits(slow_state[case.slots[untouched]], case.state[case.slots[untouched]])


@pytest.mark.parametrize("taps", [1, 2, 16])
@pytest.mark.parametrize(("key", "value"), [(16, 16), (80, 48), (256, 240)])
def test_taps_and_head_sizes(level: str, key: int, value: int, taps: int) -> None:
    case = windows([20, 2, 35], -5.0, heads=3, key=key, value=value, taps=taps)
    state, conv = case.memory()
    o = cpu.kda_window(*case.inputs, state, conv, case.slots, case.ragged)
    assert same_bits(o, decode(case, [20, 2, 35])[0])
    for counts in ([0, 2, 35], [17, 1, 16], [20, 0, 32]):
        state, conv = case.memory()
        cpu.kda_replay(*case.inputs, state, conv, case.slots, case.ragged, torch.tensor(counts))
        _, expected, carry = decode(case, counts)
        assert same_bits(state, expected)
        assert same_bits(conv, carry)


def test_threads_change_nothing(level: str, thread_counts: list[int]) -> None:
    case = windows([8, 1, 5, 20], -5.0, heads=3, key=128, value=128)
    results = []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        state, conv = case.memory()
        o = cpu.kda_window(*case.inputs, state, conv, case.slots, case.ragged)
        counts = torch.tensor([3, 1, 0, 18])
        cpu.kda_replay(*case.inputs, state, conv, case.slots, case.ragged, counts)
        results.append((o, state, conv))
    for result in results[1:]:
        assert all(map(same_bits, result, results[0]))


def silu_of(wanted: float) -> float:
    """The x with x sigmoid(x) = wanted >= 0, by Newton steps."""
    x = wanted
    for _ in range(50):
        s = 1 / (1 + math.exp(-x))
        x -= (x * s - wanted) / (s + x * s * (1 - s))
    return x


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("operators", "size"), [(reference, 1), (reference, 16), (cpu, 16)])
def test_worked_numbers(level: str, operators: object, size: int, bound: float | None) -> None:
    # speculative.md section 6.3: S_0 = 2; rows (k, v, decay, beta); a key of one channel is 1 when
    # normalised, so the case without normalisation is met up to the epsilon of the norm
    rows = [(1.0, 3.0, 0.5, 0.5), (1.0, 1.0, 0.5, 1.0), (1.0, 0.0, 1.0, 0.25)]
    raw, beta = torch.zeros(3, 3 * size), torch.zeros(3, 1)
    z = torch.empty(3, 1, size)
    for t, (_, v, decay, b) in enumerate(rows):
        z[t] = -40.0 if decay == 1.0 else gate_logit(math.log(decay), bound)
        raw[t, 0] = raw[t, size] = 20.0
        raw[t, 2 * size] = silu_of(v)
        beta[t] = 40.0 if b == 1.0 else math.log(b / (1 - b))
    weights = [torch.ones(size, 1) for _ in range(3)]
    gates = (torch.zeros(1), torch.zeros(1, size), bound)
    ragged, slots = Ragged.build([3]), torch.tensor([1])
    inputs = (raw, weights, z, beta, *gates)
    conv = torch.zeros(2, 3 * size, 0)
    for count, expected in enumerate([2.0, 2.0, 1.0, 0.75]):
        state = torch.zeros(2, 1, size, size)
        state[1, 0, 0, 0] = 2.0
        operators.kda_replay(*inputs, state, conv, slots, ragged, torch.tensor([count]))
        assert float(state[1, 0, 0, 0]) == pytest.approx(expected, abs=1e-5)
    state[1, 0, 0, 0] = 2.0
    o = operators.kda_window(*inputs, state, conv, slots, ragged)
    scale = size**-0.5
    assert o[:, 0, 0].tolist() == pytest.approx([2 * scale, scale, 0.75 * scale], abs=1e-5)


@pytest.mark.parametrize("operators", [cpu, reference])
def test_a_count_beyond_its_window_changes_nothing(operators: object) -> None:
    case = windows([3, 2], -5.0)
    for counts in ([4, 0], [0, -1], [1, 3], [1]):
        state, conv = case.memory()
        with pytest.raises((ShapeError, BackendError)):
            operators.kda_replay(
                *case.inputs, state, conv, case.slots, case.ragged, torch.tensor(counts)
            )
        assert same_bits(state, case.state)
        assert same_bits(conv, case.conv)


def test_what_the_library_would_trust_is_checked() -> None:
    case = windows([3, 2], -5.0)
    state, conv = case.memory()
    raw, weights, z, beta, a_log, dt_bias, bound = case.inputs

    def run(*inputs: object, conv: Tensor = conv, state: Tensor = state) -> None:
        cpu.kda_window(*inputs, state, conv, case.slots, case.ragged)

    run(raw, weights, z, beta, a_log, dt_bias, bound)
    for inputs in (
        (raw[:4], weights, z, beta, a_log, dt_bias, bound),
        (raw.double(), weights, z, beta, a_log, dt_bias, bound),
        (raw, [weights[0], weights[1], weights[2][:-1]], z, beta, a_log, dt_bias, bound),
        (raw, weights, z[:, :, :16], beta, a_log, dt_bias, bound),
        (raw, weights, z, beta[:, :1], a_log, dt_bias, bound),
        (raw, weights, z, beta, a_log[:1], dt_bias, bound),
        (raw, weights, z, beta, a_log, dt_bias[:, :16], bound),
        (raw, weights, z, beta, a_log, dt_bias, 0.0),
        (raw, [w.repeat(1, 5) for w in weights], z, beta, a_log, dt_bias, bound),
    ):
        with pytest.raises(ShapeError):
            run(*inputs)
    with pytest.raises(ShapeError, match="conv"):
        run(*case.inputs, conv=conv[:, :, :2])
    with pytest.raises(ShapeError, match="multiples of 16"):
        run(*case.inputs, state=state[..., :24].contiguous())
    outside = torch.tensor([0, 5])
    with pytest.raises(BackendError):
        cpu.kda_window(*case.inputs, state, conv, outside, case.ragged)
