"""Recorded native calls: run again on what the tensors hold now, refused where torch computes."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moonlet.core.errors import BackendError
from moonlet.kernels import _native_ops
from moonlet.kernels.linear import cpu as linear
from moonlet.kernels.linear.reference import Stored
from moonlet.kernels.rms_norm import cpu as norms
from moonlet.kernels.rows import cpu as rows
from moonlet.kernels.tape import Tape
from tests.kernels.native_cases import needs_native

pytestmark = needs_native


def computation(x_TD: Tensor, weight_DD: Tensor, scale_D: Tensor) -> Tensor:
    """Three different calls, strided rows among them."""
    q, wide = linear.linear_many(x_TD, [[Stored(weight_DD)], [Stored(weight_DD)] * 2])
    part = norms.rms_norm(wide[:, : x_TD.shape[1]], scale_D, 1e-5)
    return rows.add(rows.sigmoid_gate(q, part), x_TD)


def recorded(*inputs: Tensor) -> tuple[Tape, Tensor]:
    tape = Tape()
    with torch.inference_mode(), tape.recording():
        result = computation(*inputs)
    return tape, result


def test_a_tape_computes_on_what_its_inputs_hold_now() -> None:
    x, weight, scale = torch.randn(3, 20), torch.randn(20, 20), torch.randn(20)
    tape, result = recorded(x, weight, scale)
    assert tape.refusal is None
    assert tape.num_calls == 4
    # five results, one of them twice as wide; recording computes as well
    assert tape.num_bytes == 6 * 3 * 20 * 4
    assert torch.equal(result, computation(x, weight, scale))
    for _ in range(3):
        x.copy_(torch.randn(3, 20))
        # memory that the computation let go of must not be in anyone's hands
        gc.collect()
        others = [torch.full((3, 20 * n), float("nan")) for n in (1, 2) * 20]
        tape.replay()
        assert torch.equal(result, computation(x, weight, scale))
        assert all(bool(other.isnan().all()) for other in others)


def test_packed_weights_are_read_from_a_tape() -> None:
    x, codes = torch.randn(2, 96), torch.randint(256, (40, 48), dtype=torch.uint8)
    scale = torch.randint(118, 124, (40, 3), dtype=torch.uint8)
    tape, group = Tape(), [Stored(codes, scale), Stored(torch.randn(7, 96))]
    with torch.inference_mode(), tape.recording():
        one = linear.linear(x, codes, scale)
        (many,) = linear.linear_many(x, [group])
    # the reordered inputs of both calls are kept beside the results
    assert tape.refusal is None
    assert tape.num_bytes == 2 * 4 * (40 + 47 + 2 * 128)
    x.copy_(torch.randn(2, 96))
    gc.collect()
    others = [torch.full((2, 128), float("nan")) for _ in range(40)]
    tape.replay()
    assert torch.equal(one, linear.linear(x, codes, scale))
    assert torch.equal(many[:, :40], one)
    assert all(bool(other.isnan().all()) for other in others)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: x.add_(1), "add_"),
        (lambda x: torch.cat([x, x]), "cat"),
        (lambda x: x.T.contiguous(), "contiguous"),
        (lambda x: float(x[0, 0]), "item"),
        (lambda x: x.new_zeros(3), "new_zeros"),
    ],
)
def test_what_torch_computes_makes_a_tape_unusable(
    act: Callable[[Tensor], object], name: str
) -> None:
    tape, x = Tape(), torch.randn(4, 6)
    with torch.inference_mode(), tape.recording():
        y = rows.add(x, x)
        assert tape.refusal is None
        act(y)
        rows.add(y, y)
    assert tape.refusal == f"torch computes {name} in between"
    with pytest.raises(BackendError, match="torch computes"):
        tape.replay()


def test_views_and_fresh_memory_are_allowed() -> None:
    tape, x = Tape(), torch.randn(4, 6)
    with torch.inference_mode(), tape.recording():
        a, b = x.unflatten(1, (2, 3)).chunk(2, dim=1)
        torch.empty(3, 2).view(6).unbind()
        x.new_empty(4), torch.arange(5), torch.empty_like(x)
        rows.add(x.flatten(), x.reshape(24).contiguous())
        assert a.shape == b.shape
    assert tape.refusal is None


def test_calls_outside_and_in_other_threads_are_not_recorded() -> None:
    tape, x = Tape(), torch.randn(4)
    rows.add(x, x)
    with tape.recording():
        rows.add(x, x)
        other = threading.Thread(target=rows.add, args=(x, x))
        other.start()
        other.join()
    rows.add(x, x)
    assert tape.num_calls == 1
    assert _native_ops._recording.tape is None


def test_a_function_without_a_number_is_refused() -> None:
    tape, out = Tape(), torch.empty(1)
    with tape.recording():
        _native_ops.call("probe_fma", out, 1, 12)
    assert tape.refusal == "moonlet_probe_fma cannot be run from a tape"


def test_a_refused_call_says_which() -> None:
    table, ids = torch.randn(5, 8), torch.tensor([1, 2])
    tape = Tape()
    with torch.inference_mode(), tape.recording():
        rows.add(table, table)
        rows.embed(ids, table, torch.float32)
    ids[1] = 5
    with pytest.raises(BackendError, match="call 1 of a tape failed with status 1"):
        tape.replay()
