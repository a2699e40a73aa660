"""Rows and states leave the arenas and come back with the same bits, and touch nothing else."""

from collections.abc import Sequence

import pytest
import torch

from moonlet.core.errors import ShapeError
from moonlet.engine.cache.state import PagedState, page_bytes, slot_bytes
from moonlet.engine.cache.transfer import SequenceMemory
from moonlet.testing import tiny_config

# two MLA layers, so that a layer written to another's place shows
CONFIG = tiny_config(num_hidden_layers=5, moe_layers=(1, 2, 3, 4))
PAGE, SLOTS, PAGES = 4, 3, 7
DTYPES = [torch.float32, torch.bfloat16]


def filled(dtype: torch.dtype, seed: int) -> PagedState:
    """A state of random bit patterns: NaNs with payloads, infinities, denormals, both zeros."""
    state = PagedState(
        CONFIG,
        num_slots=SLOTS,
        num_pages=PAGES,
        page_size=PAGE,
        max_model_len=PAGE * PAGES,
        dtype=dtype,
    )
    generator = torch.Generator().manual_seed(seed)
    for arena in tensors(state):
        raw = arena.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    for mla in state._mla.values():
        mla.pages_GLC[0] = 0
    return state


def tensors(state: PagedState) -> list[torch.Tensor]:
    return [
        *(tensor for a in state._kda.values() for tensor in (a.recurrent_GHKV, a.conv_GCW)),
        *(a.pages_GLC for a in state._mla.values()),
    ]


def bits(state: PagedState) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for tensor in tensors(state)]


def assert_same_except(
    state: PagedState, before: list[torch.Tensor], slots: Sequence[int], pages: Sequence[int]
) -> None:
    num_kda = 2 * len(state._kda)
    for index, (now, then) in enumerate(zip(bits(state), before, strict=True)):
        free = slots if index < num_kda else pages
        keep = [g for g in range(now.shape[0]) if g not in free]
        assert torch.equal(now[keep], then[keep])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back(dtype: torch.dtype) -> None:
    source, target = filled(dtype, 1), filled(dtype, 2)
    from_pages, to_pages = [5, 2, 7], [3, 6, 1]
    for start, stop in ((0, 12), (0, 4), (3, 5), (5, 6), (7, 12)):
        before = bits(target)
        rows = source.read_rows(from_pages, start, stop)
        assert rows.shape == (stop - start, page_bytes(CONFIG, PAGE, dtype) // PAGE)
        target.write_rows(to_pages, start, rows)
        assert torch.equal(target.read_rows(to_pages, start, stop), rows)
        for position in range(start, stop):
            page, row = divmod(position, PAGE)
            for ours, theirs in zip(source._mla.values(), target._mla.values(), strict=True):
                assert torch.equal(
                    ours.pages_GLC[from_pages[page], row].view(torch.uint8),
                    theirs.pages_GLC[to_pages[page], row].view(torch.uint8),
                )
        written = to_pages[start // PAGE : -(-stop // PAGE)]
        assert_same_except(target, before, [], written)
    target.check()


def test_rows_beyond_a_range_stay() -> None:
    state = filled(torch.float32, 1)
    before = state.read_rows([1, 2], 0, 8)
    state.write_rows([1, 2], 3, filled(torch.float32, 2).read_rows([4, 5], 0, 2))
    after = state.read_rows([1, 2], 0, 8)
    kept = [0, 1, 2, 5, 6, 7]
    assert torch.equal(after[kept], before[kept])
    assert not torch.equal(after[3:5], before[3:5])


def test_a_row_is_all_layers_in_order() -> None:
    state = filled(torch.bfloat16, 1)
    row = state.read_rows([6], 2, 3)[0]
    parts = [arena.pages_GLC[6, 2].view(torch.uint8) for arena in state._mla.values()]
    assert torch.equal(row, torch.cat(parts))
    # ranges are pieces of the whole, so units can be cut out of it
    whole = state.read_rows([6, 3], 0, 8)
    assert torch.equal(whole[3:7], state.read_rows([6, 3], 3, 7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slot_comes_back(dtype: torch.dtype) -> None:
    source, target = filled(dtype, 1), filled(dtype, 2)
    before = bits(target)
    taken = source.read_slot(2)
    assert taken.numel() == slot_bytes(CONFIG, dtype)
    target.write_slot(3, taken)
    assert torch.equal(target.read_slot(3), taken)
    for ours, theirs in zip(source._kda.values(), target._kda.values(), strict=True):
        for mine, yours in (
            (ours.recurrent_GHKV, theirs.recurrent_GHKV),
            (ours.conv_GCW, theirs.conv_GCW),
        ):
            assert torch.equal(mine[2].view(torch.uint8), yours[3].view(torch.uint8))
    assert_same_except(target, before, [3], [])


def test_the_bytes_of_a_head_are_its_own() -> None:
    """Changing one head of one layer changes that part of the bytes only."""
    state, head, layer = filled(torch.bfloat16, 1), 1, 2
    before = state.read_slot(1)
    arena = list(state._kda.values())[layer]
    width = CONFIG.kda.head_dim
    arena.recurrent_GHKV[1, head] = 3.0
    for part in range(3):
        first = part * CONFIG.kda.projection_size + head * width
        arena.conv_GCW[1, first : first + width] = part + 4.0
    changed = state.read_slot(1) != before
    assert changed[layer, head].float().mean() > 0.5
    changed[layer, head] = False
    assert not changed.any()
    recurrent = width * width * 4
    head_bytes = state.read_slot(1)[layer, head]
    assert (head_bytes[:recurrent].view(torch.float32) == 3.0).all()
    carries = head_bytes[recurrent:].view(torch.bfloat16).reshape(3, -1)
    assert [set(row.tolist()) for row in carries] == [{4.0}, {5.0}, {6.0}]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_inside_the_arenas(dtype: torch.dtype) -> None:
    state = filled(dtype, 1)
    before, slot, rows = bits(state), state.read_slot(1), state.read_rows([2, 6], 0, 8)
    state.copy_slot(1, 3)
    state.copy_rows(2, 6, 3)
    assert torch.equal(state.read_slot(3), slot)
    assert torch.equal(state.read_rows([6], 0, 3), rows[:3])
    assert torch.equal(state.read_rows([6], 3, 4), rows[7:])
    assert_same_except(state, before, [3], [6])


def test_flat_bytes_are_taken_as_well() -> None:
    source, target = filled(torch.float32, 1), filled(torch.float32, 2)
    ours = SequenceMemory(state=source, slot=1, pages=[4, 2])
    theirs = SequenceMemory(state=target, slot=2, pages=[1, 3])
    theirs.write_rows(2, ours.read_rows(2, 7))
    theirs.write_state(ours.read_state())
    assert ours.read_rows(2, 7).ndim == ours.read_state().ndim == 1
    assert torch.equal(target.read_rows([1, 3], 2, 7), source.read_rows([4, 2], 2, 7))
    assert torch.equal(target.read_slot(2), source.read_slot(1))


def test_what_was_read_does_not_change_later() -> None:
    state = filled(torch.float32, 1)
    memory = SequenceMemory(state=state, slot=1, pages=[1])
    rows, slot = memory.read_rows(0, 4), memory.read_state()
    copies = rows.copy(), slot.copy()
    for tensor in tensors(state):
        tensor.view(torch.uint8).fill_(0)
    assert (rows == copies[0]).all()
    assert (slot == copies[1]).all()


def test_ranges_outside_are_refused_before_anything_is_written() -> None:
    state = filled(torch.float32, 1)
    before = bits(state)
    rows = state.read_rows([1, 2], 0, 8)
    for pages, start, stop in (([1], 0, 5), ([1], -1, 2), ([1], 2, 2), ([], 0, 1), ([1], 3, 2)):
        with pytest.raises(ShapeError, match="not inside"):
            state.read_rows(pages, start, stop)
    with pytest.raises(ShapeError, match="not inside 1 pages"):
        state.write_rows([1], 0, rows)
    for page in (0, PAGES + 1, -1):
        with pytest.raises(ShapeError, match="outside 1 to 7"):
            state.write_rows([1, page], 0, rows)
    with pytest.raises(ShapeError, match="not rows of"):
        state.write_rows([1, 2], 0, rows.flatten()[:-1])
    with pytest.raises(ShapeError, match="not rows of"):
        state.write_rows([1, 2], 0, rows.float())
    with pytest.raises(ShapeError, match="not a state of"):
        state.write_slot(1, state.read_slot(1)[:-1])
    assert all(torch.equal(a, b) for a, b in zip(bits(state), before, strict=True))
