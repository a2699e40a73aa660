"""Prefix reuse around a real (tiny) model: what is resumed continues as if computed cold."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from moonlet.engine import Engine, TokenOutput
from moonlet.engine.memory import MemoryOptions
from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_model
from tests.engine.test_engine_model import assert_same, prompt_of, request

UNIT, PAGE = 4, 12
MakeShared = Callable[..., Engine]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model()


@pytest.fixture
def make_shared(model: Transformer) -> Iterator[MakeShared]:
    """Engines with prefix reuse that check themselves after every step and leak nothing."""
    engines: list[Engine] = []

    def make(num_pages: int | None = None, num_checkpoints: int = 20, **limits: object) -> Engine:
        memory = MemoryOptions(
            page_size=PAGE,
            unit_size=UNIT,
            num_pages=num_pages,
            num_checkpoints=num_checkpoints,
            unified_pool=bool(limits.pop("is_unified", False)),
        )
        defaults = {"max_num_seqs": 4, "max_model_len": 120, "check_each_step": True}
        engines.append(Engine(model, memory=memory, **{**defaults, **limits}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine.check()
        stats = engine.stats()
        assert stats.num_free_slots == stats.num_slots
        assert stats.num_free_pages == stats.num_pages


@pytest.fixture(scope="module")
def cold(model: Transformer) -> Iterator[Callable[[list[int]], TokenOutput]]:
    """What a request gives on an engine that shares nothing."""
    memory = MemoryOptions(prefix_caching=False)
    with Engine(model, max_num_seqs=1, max_model_len=120, memory=memory) as engine:
        yield lambda prompt, **params: engine.submit(request("cold", prompt, **params)).result()


def ask(engine: Engine, prompt: list[int], **params: object) -> tuple[TokenOutput, int]:
    handle = engine.submit(request(f"r{random.random()}", prompt, **params))
    output = handle.result()
    assert handle.num_cached_tokens is not None
    return output, handle.num_cached_tokens


@pytest.mark.parametrize("is_unified", [False, True])
@pytest.mark.parametrize("length", [3, 4, 5, 11, 12, 13, 24, 47, 48, 90])
def test_the_same_prompt_again(make_shared: MakeShared, cold, length: int, is_unified: bool):
    engine, prompt = make_shared(is_unified=is_unified), prompt_of(length, length)
    first, none = ask(engine, prompt)
    again, cached = ask(engine, prompt)
    assert (none, cached) == (0, (length - 1) // UNIT * UNIT)
    assert_same(first, cold(prompt))
    assert_same(again, cold(prompt))


@pytest.mark.parametrize("budget", [5, 16, 64])
def test_turns_edits_and_branches(make_shared: MakeShared, cold, budget: int):
    engine = make_shared(max_num_batched_tokens=budget)
    generator, prompt = random.Random(budget), prompt_of(1, 30)
    total = 0
    for turn in range(4):
        output, cached = ask(engine, prompt, max_tokens=7)
        assert_same(output, cold(prompt, max_tokens=7))
        total += cached
        prompt = [*prompt, *output.ids, *prompt_of(turn + 50, 5)]
        edited = [*prompt]
        edited[generator.randrange(10, 30)] += 1
        for other in (edited, [*prompt[:21], *prompt_of(turn, 9)]):
            output, cached = ask(engine, other, max_tokens=3)
            assert_same(output, cold(other, max_tokens=3))
            total += cached
    assert total > 150


def test_company_preemption_and_eviction_change_nothing(make_shared: MakeShared, cold):
    # ten pages hold one request of full length; checkpoints are as rare as they may be
    engine = make_shared(num_pages=10, num_checkpoints=2, max_num_batched_tokens=24)
    base = prompt_of(3, 40)
    prompts = [[*base[: 10 * (i % 4) + 5], *prompt_of(i, 8)] for i in range(12)]
    handles = [engine.submit(request(f"r{i}", p, max_tokens=40)) for i, p in enumerate(prompts)]
    for handle, prompt in zip(handles, prompts, strict=True):
        assert_same(handle.result(), cold(prompt, max_tokens=40))
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hits > 0
    assert stats.num_evicted_checkpoints > 0


def test_sampled_and_penalised_tokens_survive_preemption(make_shared: MakeShared, cold):
    params = {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.5, "max_tokens": 60}
    engine = make_shared(num_pages=10, num_checkpoints=4)
    prompts = [prompt_of(i, 14) for i in range(4)]
    handles = [engine.submit(request(f"r{i}", p, **params)) for i, p in enumerate(prompts)]
    for handle, prompt in zip(handles, prompts, strict=True):
        assert handle.result().ids == cold(prompt, **params).ids
    assert engine.stats().num_preemptions > 0


def test_no_fresh_memory_reaches_a_result(make_shared: MakeShared, cold):
    engine, prompt = make_shared(), prompt_of(9, 50)
    output, _ = ask(engine, prompt)
    cache, state = engine._manager.cache, engine._runner.state
    kept = cache.states.cached()
    for kda in state._kda.values():
        for slot in set(range(state.num_slots + 1)) - kept:
            kda.recurrent_GHKV[slot] = torch.nan
            kda.conv_GCW[slot] = torch.nan
    for mla in state._mla.values():
        for page in set(range(1, state.num_pages + 1)) - cache.pages.cached():
            mla.pages_GLC[page] = torch.nan
    again, cached = ask(engine, prompt)
    assert cached == 48
    assert_same(again, output)


def test_numbers_that_are_not_finite_are_never_shared(model: Transformer, make_shared, cold):
    engine, prompt = make_shared(), prompt_of(4, 30)
    state = engine._runner.state
    spoil = engine._runner.execute

    def spoiled(step):
        results = spoil(step)
        for chunk in step.chunks:
            next(iter(state._kda.values())).recurrent_GHKV[chunk.sequence.slot, 0, 0, 0] = torch.nan
        return results

    engine._runner.execute = spoiled
    ask(engine, prompt, max_tokens=1)
    engine._runner.execute = spoil
    assert engine.stats().num_checkpoints == 0
    output, cached = ask(engine, prompt)
    assert cached == 0
    assert_same(output, cold(prompt))


def test_a_deadline_ends_a_request(make_shared: MakeShared):
    engine = make_shared()
    late = request("late", prompt_of(1, 20), max_tokens=90)
    object.__setattr__(late, "deadline_s", 1e-9)
    output = engine.submit(late).result()
    assert output.finish == "error"
    assert "deadline" in output.error
