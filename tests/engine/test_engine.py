"""The engine around a scripted model: streams, aborts, counters."""

import asyncio
import random
from collections.abc import Sequence as SequenceOf

import pytest
import torch

from moonlet.engine import RequestHandle
from moonlet.testing import ScriptedModel, count_up, reply_with
from tests.engine.running import END, Gate, MakeEngine, request

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


def test_the_rows_of_every_step_are_told_before_it(make_engine: MakeEngine) -> None:
    rows: list[int] = []
    model = ScriptedModel(
        count_up(), before_forward=lambda meta: rows.append(-meta.ragged.num_rows)
    )
    engine = make_engine(model, max_num_batched_tokens=4, before_step=rows.append)
    engine.submit(request("a", range(6), max_tokens=2)).result()
    assert rows == [4, -4, 2, -2, 1, -1]


def test_a_listener_that_raises_ends_the_step_and_not_the_engine(make_engine: MakeEngine) -> None:
    def listen(rows: int) -> None:
        if rows == 5:
            raise ValueError("no")

    engine = make_engine(ScriptedModel(count_up()), before_step=listen)
    assert engine.submit(request("a", range(5))).result().finish == "error"
    assert engine.submit(request("b", range(3), max_tokens=2)).result().ids == (3, 4)
