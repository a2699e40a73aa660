"""What goes wrong in one request or step, and what the others notice: nothing."""

import threading
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch

from moonlet.core.errors import RequestError
from moonlet.engine import Engine, TokenOutput
from moonlet.model.state import BatchMeta
from moonlet.testing import ScriptedModel, count_up
from tests.engine.running import Gate, MakeEngine, request
from tests.patience import PATIENCE_S


def test_failing_step_ends_its_requests_and_nothing_else(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def script(prompt: SequenceOf[int], output: SequenceOf[int]) -> int:
        if prompt[0] == 13 and len(output) == 2:
            raise RuntimeError("boom")
        return 7

    gate = Gate()
    engine = make_engine(ScriptedModel(script, before_forward=gate), max_num_seqs=2)
    first = engine.submit(request("first", [13], max_tokens=9))
    gate.wait_until_inside()
    second = engine.submit(request("second", [1], max_tokens=9))
    third = engine.submit(request("third", [1], max_tokens=9))
    gate.open()
    assert first.result().finish == "error"
    output = second.result()
    assert (output.finish, output.ids) == ("error", (7,))
    assert "RuntimeError" in str(output.error)
    assert third.result().ids == (7,) * 9
    assert "boom" in caplog.text
    engine.check()


def test_failing_step_drops_an_open_window(make_engine: MakeEngine) -> None:
    def leave_a_window_and_fail(meta: BatchMeta) -> None:
        if model.num_forward_calls == 2:
            arena = engine._runner.state._kda[0]
            arena._pending = (arena.recurrent_GHKV[:1], arena.conv_GCW[:1])
            raise RuntimeError("between window and commit")

    model = ScriptedModel(count_up(), before_forward=leave_a_window_and_fail)
    engine = make_engine(model)
    assert engine.submit(request("a", max_tokens=5)).result().finish == "error"
    engine.check()


def test_nan_fails_one_request_only(make_engine: MakeEngine) -> None:
    def script(prompt: SequenceOf[int], output: SequenceOf[int]) -> torch.Tensor | int:
        return torch.full((512,), torch.nan) if prompt[0] == 13 and len(output) == 3 else 7

    engine = make_engine(ScriptedModel(script))
    handles = [engine.submit(request(f"r{i}", [i], max_tokens=8)) for i in (12, 13, 14)]
    outputs = [handle.result() for handle in handles]
    assert [output.finish for output in outputs] == ["length", "error", "length"]
    assert outputs[1].ids == (7, 7, 7)


class Evens:
    """Allows even ids below 100 and is done after some."""

    def __init__(self, count: int, *, breaks: bool = False) -> None:
        self.left = count
        self.breaks = breaks

    def fill_mask(self, out: np.ndarray) -> None:
        out[:3] = 0x55555555

    def accept(self, id: int) -> None:
        assert id % 2 == 0
        self.left -= 1

    def rollback(self, n: int) -> None:
        self.left += n

    def is_done(self) -> bool:
        if self.breaks:
            raise RuntimeError("broken grammar")
        return self.left == 0


def test_constraint_shapes_and_ends_one_request(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(lambda prompt, output: torch.arange(512.0)))
    bound = engine.submit(request("bound", constraint=Evens(3)))
    free = engine.submit(request("free", max_tokens=2))
    assert bound.result() == TokenOutput((94, 94, 94), None, "stop")
    assert free.result().ids == (511, 511)


def test_broken_constraint_fails_its_request_only(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(lambda prompt, output: torch.arange(512.0)))
    broken = engine.submit(request("broken", constraint=Evens(3, breaks=True)))
    free = engine.submit(request("free", max_tokens=4))
    output = broken.result()
    assert output.finish == "error"
    assert "broken grammar" in str(output.error)
    assert free.result().ids == (511,) * 4


def test_dying_loop_leaves_nobody_waiting(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    engine = make_engine(ScriptedModel(count_up(), before_forward=gate))
    handle = engine.submit(request("a", max_tokens=5))
    gate.wait_until_inside()

    def broken_schedule() -> None:
        raise RuntimeError("scheduler is broken")

    engine._scheduler.schedule = broken_schedule
    gate.open()
    output = handle.result()
    assert output.finish == "error"
    assert "scheduler is broken" in caplog.text
    with pytest.raises(RequestError, match="shutting down"):
        engine.submit(request("b"))


def test_dying_loop_that_cannot_clean_up_leaves_nobody_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    engine = Engine(ScriptedModel(count_up(), before_forward=gate), max_model_len=64)
    handles = [engine.submit(request(name, max_tokens=1)) for name in "ab"]
    gate.wait_until_inside()

    def broken_finish(sequence: object, reason: object) -> None:
        raise RuntimeError("cannot free")

    engine._scheduler.finish = broken_finish
    gate.open()
    finishes: list[str | None] = []
    reader = threading.Thread(
        target=lambda: finishes.extend(handle.result().finish for handle in handles), daemon=True
    )
    reader.start()
    reader.join(PATIENCE_S)
    assert finishes == ["error", "error"]
    assert "did not end cleanly" in caplog.text
    engine.close()
