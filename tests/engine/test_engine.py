"""The engine around a scripted model: streams, aborts, failures, closing, counters."""

import asyncio
import random
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch

from moonlet.core.errors import ConfigError, PromptTooLong, RequestError
from moonlet.engine import Engine, EngineRequest, RequestHandle, SamplingParams, TokenOutput
from moonlet.model.state import BatchMeta
from moonlet.testing import ScriptedModel, count_up, reply_with

END = 258
MakeEngine = Callable[..., Engine]


def request(
    name: str, prompt: SequenceOf[int] = (1, 2, 3), constraint: object = None, **params: object
) -> EngineRequest:
    params.setdefault("temperature", 0.0)
    sampling = SamplingParams(**params)
    return EngineRequest(
        request_id=name, prompt_ids=prompt, sampling=sampling, constraint=constraint
    )


class Gate:
    """Lets a forward pass begin only when the test says so; `open` lets all of them."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, meta: BatchMeta) -> None:
        self.entered.release()
        if not self._is_open:
            assert self._permits.acquire(timeout=30)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()

    def open(self) -> None:
        self._is_open = True
        self._permits.release(1000)

    def wait_until_inside(self) -> None:
        assert self.entered.acquire(timeout=30)


# ---- generation -------------------------------------------------------------------------------


def test_reply_ends_with_the_stop_id(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(reply_with([10, 11, 12], END)))
    outputs = list(engine.submit(request("a")))
    assert [id for output in outputs for id in output.ids] == [10, 11, 12, END]
    assert outputs[-1].finish == "stop"
    assert all(output.finish is None for output in outputs[:-1])
    assert outputs[-1].logprobs is None


def test_prompt_is_fed_in_chunks_of_the_budget(make_engine: MakeEngine) -> None:
    model = ScriptedModel(reply_with(lambda prompt: prompt, END))
    engine = make_engine(model, max_num_batched_tokens=4)
    prompt = list(range(30, 41))
    assert list(engine.submit(request("a", prompt)).result().ids) == [*prompt, END]
    # three chunks of the prompt, the last of which gives the first id
    assert model.num_forward_calls == 3 + len(prompt)
    assert model.num_rows == 2 * len(prompt)


@pytest.mark.parametrize(
    ("params", "expected", "finish"),
    [
        ({"max_tokens": 3}, [4, 5, 6], "length"),
        ({"stop_token_ids": frozenset({6})}, [4, 5, 6], "stop"),
        ({"max_tokens": 1}, [4], "length"),
    ],
)
def test_how_generation_ends(
    make_engine: MakeEngine, params: dict[str, object], expected: list[int], finish: str
) -> None:
    engine = make_engine(ScriptedModel(count_up()))
    output = engine.submit(request("a", **params)).result()
    assert (list(output.ids), output.finish) == (expected, finish)


def test_ignore_eos_runs_to_the_context(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(reply_with([10], END)), max_model_len=8)
    output = engine.submit(request("a", [1, 2, 3], ignore_eos=True)).result()
    assert output.ids == (10, END, END, END, END)
    assert output.finish == "length"


def test_prompt_of_context_minus_one_gives_one_token(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()), max_model_len=8)
    assert engine.submit(request("a", range(7))).result().ids == (7,)


def test_logprobs_come_with_every_id(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()))
    output = engine.submit(request("a", max_tokens=5, logprobs=2)).result()
    assert output.logprobs is not None
    assert [entry.id for entry in output.logprobs] == list(output.ids)
    assert all(len(entry.top) == 2 and entry.top[0][0] == entry.id for entry in output.logprobs)
    assert all(-1e-6 < entry.logprob <= 0 for entry in output.logprobs)


def test_eight_streams_take_the_forward_calls_of_one(make_engine: MakeEngine) -> None:
    calls = {}
    for streams in (1, 8):
        gate = Gate()
        model = ScriptedModel(count_up(), before_forward=gate)
        engine = make_engine(model, max_num_seqs=8)
        first = engine.submit(request("r0", max_tokens=40))
        gate.wait_until_inside()
        rest = [engine.submit(request(f"r{i}", max_tokens=40)) for i in range(1, streams)]
        gate.open()
        for handle in (first, *rest):
            assert handle.result().ids == tuple(range(4, 44))
        calls[streams] = engine.stats().num_forward_calls
        assert calls[streams] == model.num_forward_calls
    assert calls[1] == 40
    assert calls[8] <= 41


def test_more_requests_than_slots_all_finish(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()), max_num_seqs=3, num_pages=20)
    handles = [engine.submit(request(f"r{i}", [i], max_tokens=1 + i % 7)) for i in range(40)]
    for i, handle in enumerate(handles):
        assert handle.result().ids == tuple(range(i + 1, i + 2 + i % 7))


def test_idle_engine_takes_no_steps(make_engine: MakeEngine) -> None:
    model = ScriptedModel(count_up())
    engine = make_engine(model)
    engine.submit(request("a", max_tokens=3)).result()
    before = engine.stats()
    for _ in range(20):
        engine.check()
    assert engine.stats() == before
    assert model.num_forward_calls == 3


def test_stats_count_what_happened(make_engine: MakeEngine) -> None:
    def script(prompt: SequenceOf[int], output: SequenceOf[int]) -> torch.Tensor | int:
        return torch.full((512,), torch.nan) if prompt[0] == 13 else 7

    engine = make_engine(ScriptedModel(script))
    engine.submit(request("a", range(5), max_tokens=4)).result()
    engine.submit(request("b", [13])).result()
    handle = engine.submit(request("c", ignore_eos=True))
    for _ in handle:
        break
    handle.result()
    stats = engine.stats()
    assert (stats.num_finished, stats.num_failed, stats.num_aborted) == (1, 1, 1)
    assert stats.num_prompt_tokens == 5 + 1 + 3
    assert stats.num_generated_tokens >= 4 + 1
    assert stats.num_steps == stats.num_forward_calls


# ---- asyncio ----------------------------------------------------------------------------------


def test_fifty_async_streams(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()), max_num_seqs=8)

    async def read(i: int) -> list[int]:
        handle = engine.submit(request(f"r{i}", [i], max_tokens=10))
        return [id async for output in handle.aiter() for id in output.ids]

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*(read(i) for i in range(50)))

    results = asyncio.run(read_all())
    assert results == [list(range(i + 1, i + 11)) for i in range(50)]


def test_cancelled_reader_aborts_its_request(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(ScriptedModel(count_up(), before_forward=gate))

    async def scenario() -> int:
        handle = engine.submit(request("a", ignore_eos=True))
        task = asyncio.create_task(anext(handle.aiter()))
        gate.let(1)
        await task
        reader = asyncio.create_task(drain(handle))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        before = engine.stats().num_steps
        gate.open()
        handle.result()
        return engine.stats().num_steps - before

    async def drain(handle: RequestHandle) -> None:
        async for _ in handle.aiter():
            pass

    assert asyncio.run(scenario()) <= 2
    assert engine.stats().num_aborted == 1


# ---- abort ------------------------------------------------------------------------------------


def test_leaving_the_loop_aborts(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(ScriptedModel(count_up(), before_forward=gate))
    handle = engine.submit(request("a", ignore_eos=True))
    gate.let(1)
    for output in handle:
        assert output.ids == (4,)
        break
    gate.wait_until_inside()
    gate.open()
    assert handle.result().finish == "abort"
    assert engine.stats().num_steps <= 3


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
def test_abort_frees_at_once(make_engine: MakeEngine, state: str) -> None:
    gate = Gate()
    model = ScriptedModel(count_up(), before_forward=gate)
    engine = make_engine(model, max_num_seqs=2, max_num_batched_tokens=4)
    lengths = {"waiting": 3, "prefill": 40, "decode": 3}
    keeper = engine.submit(request("keeper", [100], max_tokens=20))
    gate.wait_until_inside()
    if state == "waiting":
        engine.submit(request("filler", [1], max_tokens=20))
    victim = engine.submit(request("victim", range(lengths[state]), ignore_eos=True))
    gate.let(3)
    for _ in range(3):
        gate.wait_until_inside()
    assert engine.stats().num_waiting == (1 if state == "waiting" else 0)
    victim.abort()
    gate.open()
    output = victim.result()
    assert output.finish == "abort"
    assert bool(output.ids) is (state == "decode")
    assert keeper.result().ids == tuple(range(101, 121))
    assert engine.submit(request("later", [5], max_tokens=1)).result().ids == (6,)


def test_two_hundred_aborts_at_random_points_leak_nothing(make_engine: MakeEngine) -> None:
    # the gate bounds the steps, so that at most a few requests can reach their end unaborted
    generator, gate = random.Random(5), Gate()
    engine = make_engine(
        ScriptedModel(count_up(), before_forward=gate),
        max_num_seqs=4,
        max_num_batched_tokens=6,
        num_pages=40,
    )
    handles: list[RequestHandle] = []
    for i in range(200):
        prompt = range(generator.randint(1, 40))
        handles.append(engine.submit(request(f"r{i}", prompt, ignore_eos=True)))
        gate.let(generator.randint(0, 2))
        if generator.random() < 0.3:
            handles[-1].abort()
        if len(handles) > 12:
            handles.pop(generator.randrange(len(handles))).abort()
    for handle in handles:
        handle.abort()
    gate.open()
    assert {handle.result().finish for handle in handles} <= {"abort", "length"}
    engine.check()
    stats = engine.stats()
    assert (stats.num_free_slots, stats.num_free_pages, stats.num_running) == (4, 40, 0)
    assert stats.num_aborted + stats.num_finished == 200
    assert stats.num_aborted > 100
    assert engine.submit(request("normal", [1], max_tokens=3)).result().ids == (2, 3, 4)


def test_abort_of_unknown_and_finished_ids_is_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()))
    handle = engine.submit(request("a", max_tokens=2))
    assert handle.result().finish == "length"
    engine.abort("a")
    engine.abort("never")
    handle.abort()
    engine.check()


# ---- failures ---------------------------------------------------------------------------------


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


# ---- refusals ---------------------------------------------------------------------------------


def test_too_long_requests_are_refused_naming_both_lengths(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()), max_model_len=16)
    for prompt, max_tokens in ((16, None), (20, None), (10, 7)):
        with pytest.raises(PromptTooLong, match=rf"{prompt} tokens.* 16;") as caught:
            engine.submit(request("a", range(prompt), max_tokens=max_tokens))
        assert caught.value.status == 400
        assert caught.value.code == "context_length_exceeded"
    assert engine.submit(request("a", range(10), max_tokens=6)).result().finish == "length"


@pytest.mark.parametrize("id", [-1, 512, 10**12])
def test_ids_outside_the_vocabulary_are_refused(make_engine: MakeEngine, id: int) -> None:
    engine = make_engine(ScriptedModel(count_up()))
    with pytest.raises(RequestError, match=f"prompt id {id} is outside"):
        engine.submit(request("a", [1, id]))


def test_id_in_use_is_refused_until_it_ends(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(ScriptedModel(count_up(), before_forward=gate))
    handle = engine.submit(request("a", max_tokens=2))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request("a"))
    gate.open()
    handle.result()
    assert engine.submit(request("a", max_tokens=1)).result().ids == (4,)


def test_full_queue_is_refused(make_engine: MakeEngine) -> None:
    gate = Gate()
    model = ScriptedModel(count_up(), before_forward=gate)
    engine = make_engine(model, max_num_seqs=1, max_num_queued=2)
    handles = [engine.submit(request("running", max_tokens=2))]
    gate.wait_until_inside()
    handles += [engine.submit(request(f"q{i}", max_tokens=2)) for i in range(2)]
    with pytest.raises(RequestError, match="retry") as caught:
        engine.submit(request("one too many"))
    assert (caught.value.status, caught.value.type) == (429, "engine_overloaded_error")
    gate.open()
    assert [handle.result().ids for handle in handles] == [(4, 5)] * 3


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4096"):
        Engine(ScriptedModel(count_up()), max_model_len=5000)


# ---- closing ----------------------------------------------------------------------------------


def test_close_aborts_what_runs_and_waits(make_engine: MakeEngine) -> None:
    gate = Gate()
    model = ScriptedModel(count_up(), before_forward=gate)
    engine = make_engine(model, max_num_seqs=1)
    running = engine.submit(request("running", ignore_eos=True))
    waiting = engine.submit(request("waiting", ignore_eos=True))
    gate.wait_until_inside()
    gate.let(2)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.open()
    closer.join(30)
    assert not closer.is_alive()
    assert running.result().finish == "abort"
    assert waiting.result() == TokenOutput((), None, "abort")
    assert not engine._thread.is_alive()
    with pytest.raises(RequestError, match="shutting down") as caught:
        engine.submit(request("late"))
    assert caught.value.status == 503
    engine.close()
    engine.abort("running")
    engine.check()


def test_close_can_let_requests_finish(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()), max_num_seqs=2)
    handles = [engine.submit(request(f"r{i}", [i], max_tokens=20)) for i in range(6)]
    engine.close(drain=True)
    assert [handle.result().finish for handle in handles] == ["length"] * 6


def test_drain_that_takes_too_long_is_cut(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(ScriptedModel(count_up(), before_forward=gate))
    handle = engine.submit(request("a", ignore_eos=True))
    gate.wait_until_inside()
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    engine.close(drain=True, timeout_s=0.001)
    opener.join()
    assert handle.result().finish == "abort"


def test_with_block_closes() -> None:
    with Engine(ScriptedModel(count_up()), max_model_len=64) as engine:
        handle = engine.submit(request("a", ignore_eos=True))
    assert handle.result().finish in ("abort", "length")
    assert not engine._thread.is_alive()


# ---- handles ----------------------------------------------------------------------------------


def test_slow_reader_gets_merged_outputs(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()))
    handle = engine.submit(request("a", max_tokens=9, logprobs=0))
    engine.submit(request("b", max_tokens=20)).result()
    outputs = list(handle)
    assert len(outputs) == 1
    assert outputs[0].ids == tuple(range(4, 13))
    assert outputs[0].logprobs is not None
    assert len(outputs[0].logprobs) == 9
    assert list(handle) == []
