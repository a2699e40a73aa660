"""The native short convolution for inference against its reference."""

import pytest
import torch
from torch import Tensor

from moonlet.core.errors import BackendError, ShapeError
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.short_conv import cpu, reference
from tests.kernels.native_cases import error, needs_native, same_bits

pytestmark = needs_native

# four products in float32 and a SiLU: a few units of the last place
CLOSE = 5e-7


def inputs(lens: list[int], channels: int, taps: int = 4) -> tuple[Tensor, Tensor, Tensor, Ragged]:
    generator = torch.Generator().manual_seed(channels + taps)
    x = torch.randn(sum(lens), channels, generator=generator)
    weight = torch.randn(channels, taps, generator=generator)
    carry = torch.randn(len(lens), channels, taps - 1, generator=generator)
    return x, weight, carry, Ragged.build(lens)


# pieces end at 64 rows and 512 channels: also inside the first three rows of a sequence
@pytest.mark.parametrize("channels", [1, 17, 257, 512, 1030])
@pytest.mark.parametrize("lens", [[3], [65], [62, 4, 61, 5], [1] * 70])
def test_outputs_and_carries(level: str, lens: list[int], channels: int) -> None:
    case = inputs(lens, channels)
    rows = sum(lens)
    emit = torch.tensor([rows - 1, 0, rows // 2, rows - 1])
    double = [x.double() for x in case[:3]]
    exact = reference.short_conv(*double, case[3], emit)
    seen = cpu.short_conv(*case, emit)
    # the reference accumulates in float32
    assert error(seen.y_TC, exact.y_TC) <= CLOSE
    expected = reference.short_conv(*case, emit)
    assert seen.emitted_ECW is not None
    assert expected.emitted_ECW is not None
    # carries are copies of inputs
    assert same_bits(seen.carry_SCW, expected.carry_SCW)
    assert same_bits(seen.emitted_ECW, expected.emitted_ECW)


@pytest.mark.parametrize("taps", [1, 2, 5, 16])
def test_other_numbers_of_taps(level: str, taps: int) -> None:
    case = inputs([2, 1, 40], 33, taps)
    emit = torch.tensor([0, 2, 42])
    seen, expected = cpu.short_conv(*case, emit), reference.short_conv(*case, emit)
    assert error(seen.y_TC, expected.y_TC) <= CLOSE
    assert torch.equal(seen.carry_SCW, expected.carry_SCW)
    assert seen.emitted_ECW is not None
    assert expected.emitted_ECW is not None
    assert torch.equal(seen.emitted_ECW, expected.emitted_ECW)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 63, 64, 99])
def test_cut_anywhere_equals_one_piece_equals_row_by_row(level: str, cut: int) -> None:
    x, weight, carry, ragged = inputs([100], 40)
    whole = cpu.short_conv(x, weight, carry, ragged)
    first = cpu.short_conv(x[:cut], weight, carry, Ragged.build([cut]))
    rest = cpu.short_conv(x[cut:], weight, first.carry_SCW, Ragged.build([100 - cut]))
    # one output is computed in one way, wherever it stands
    assert same_bits(torch.cat([first.y_TC, rest.y_TC]), whole.y_TC)
    assert same_bits(rest.carry_SCW, whole.carry_SCW)
    rows = []
    for row in x[:cut].split(1):
        y, carry, _ = cpu.short_conv(row, weight, carry, Ragged.build([1]))
        rows.append(y)
    assert same_bits(torch.cat(rows), first.y_TC)
    assert same_bits(carry, first.carry_SCW)


def test_emitted_carries_are_those_of_a_cut(level: str) -> None:
    x, weight, carry, ragged = inputs([70, 5], 20)
    emit = torch.arange(75)
    seen = cpu.short_conv(x, weight, carry, ragged, emit).emitted_ECW
    assert seen is not None
    for row in range(75):
        s, start = (0, 0) if row < 70 else (1, 70)
        alone = Ragged.build([row + 1 - start])
        cut = cpu.short_conv(x[start : row + 1], weight, carry[s : s + 1], alone)
        assert same_bits(seen[row], cut.carry_SCW[0])


def test_threads_do_not_change_a_bit(level: str, thread_counts: list[int]) -> None:
    case = inputs([150, 1, 30], 1500)
    seen = []
    for count in thread_counts:
        torch.set_num_threads(count)
        seen.append(cpu.short_conv(*case, torch.tensor([180, 3])))
    for other in seen[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, seen[0], strict=True))


def test_strided_inputs_are_read_as_they_are_meant(level: str) -> None:
    x, weight, carry, ragged = inputs([9, 4], 24)
    expected = cpu.short_conv(x, weight, carry, ragged)
    strided = (x.T.contiguous().T, weight.T.contiguous().T, carry.transpose(1, 2).contiguous())
    seen = cpu.short_conv(*strided[:2], strided[2].transpose(1, 2), ragged)
    assert same_bits(seen.y_TC, expected.y_TC)
    assert same_bits(seen.carry_SCW, expected.carry_SCW)


def test_what_cannot_be_served_is_refused() -> None:
    x, weight, carry, ragged = inputs([4], 8)
    with pytest.raises(ShapeError, match="1 to 16"):
        cpu.short_conv(x, torch.zeros(8, 17), carry, ragged)
    with pytest.raises(ShapeError, match="x has dtype"):
        cpu.short_conv(x.bfloat16(), weight, carry, ragged)
    with pytest.raises(ShapeError, match="carry has shape"):
        cpu.short_conv(x, weight, carry[..., :2], ragged)
    with pytest.raises(ShapeError, match="x has shape"):
        cpu.short_conv(x[:3], weight, carry, ragged)
    with pytest.raises(ShapeError, match="outside the batch of 4"):
        cpu.short_conv(x, weight, carry, ragged, torch.tensor([4]))


@pytest.mark.parametrize("taps", [1, 2, 4, 16])
@pytest.mark.parametrize(("parts", "channels"), [(1, 17), (3, 99), (3, 3 * 530)])
def test_a_step_continues_where_the_carry_lies(
    level: str, thread_counts: list[int], parts: int, channels: int, taps: int
) -> None:
    x, weight, carry, ragged = inputs([1] * 5, channels, taps)
    slots = torch.tensor([6, 0, 3, 7, 2])
    expected = cpu.short_conv(x, weight, carry, ragged)
    plain = reference.short_conv(x, weight, carry, ragged)
    weights = list(weight.chunk(parts))
    for step, counts in ((cpu.short_conv_step, thread_counts), (reference.short_conv_step, [1])):
        for count in counts:
            torch.set_num_threads(count)
            arena = torch.full((9, channels, taps - 1), torch.nan)
            arena[slots] = carry
            y = step(x, weights, arena, slots)
            if step is cpu.short_conv_step:
                # the same channel is computed in the same way as in a batch of rows
                assert same_bits(y, expected.y_TC)
            assert error(y, plain.y_TC) <= CLOSE
            assert same_bits(arena[slots], expected.carry_SCW)
            others = [slot for slot in range(9) if slot not in slots.tolist()]
            assert bool(arena[others].isnan().all()) or taps == 1


def test_a_step_outside_the_arena_changes_nothing(level: str) -> None:
    x, weight, carry, _ = inputs([1, 1], 20)
    arena = carry.clone()
    with pytest.raises(BackendError):
        cpu.short_conv_step(x, [weight], arena, torch.tensor([0, 2]))
    assert same_bits(arena, carry)
    with pytest.raises(ShapeError, match="weight has shape"):
        cpu.short_conv_step(x, [weight, weight], arena, torch.tensor([0, 1]))
