"""The engine around a real (tiny) model: nothing but the request decides what comes out."""

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest
import torch

from moonlet.engine import Engine, EngineRequest, SamplingParams, TokenOutput
from moonlet.engine.cache.blocks import NULL_BLOCK
from moonlet.model.simple_state import DenseState
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from moonlet.testing import assert_close, tiny_model

MakeEngine = Callable[..., Engine]
NUM_IDS = 20


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model()


def prompt_of(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(512) for _ in range(length)]


def request(name: str, prompt: SequenceOf[int], **params: object) -> EngineRequest:
    defaults = {"temperature": 0.0, "max_tokens": NUM_IDS, "ignore_eos": True, "logprobs": 5}
    sampling = SamplingParams(**{**defaults, **params})
    return EngineRequest(request_id=name, prompt_ids=prompt, sampling=sampling)


def assert_same(actual: TokenOutput, expected: TokenOutput) -> None:
    """Same ids, same log probabilities of the chosen and of the best ids within 1e-4."""
    assert actual.ids == expected.ids
    assert actual.finish == expected.finish
    assert actual.logprobs is not None
    assert expected.logprobs is not None
    for mine, theirs in zip(actual.logprobs, expected.logprobs, strict=True):
        assert abs(mine.logprob - theirs.logprob) <= 1e-4
        left, right = ([value for _, value in entry.top] for entry in (mine, theirs))
        assert_close(torch.tensor(left), torch.tensor(right), atol=1e-4)


def by_hand(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Greedy ids from a plain loop over dense state."""
    state, tokens, start = DenseState(model.config, 1, 100), list(prompt), 0
    with torch.inference_mode():
        for _ in range(count):
            meta = BatchMeta.build([len(tokens) - start], start_positions=[start])
            hidden = model.forward(torch.tensor(tokens[start:]), meta, state)
            start = len(tokens)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def alone(model: Transformer) -> dict[int, TokenOutput]:
    """Each of six prompts run alone in one piece."""
    results = {}
    with Engine(model, max_num_seqs=1, max_model_len=64) as engine:
        for seed in range(6):
            prompt = prompt_of(seed, 3 + 7 * seed)
            results[seed] = engine.submit(request("a", prompt)).result()
    return results


def test_greedy_equals_a_plain_loop(model: Transformer, alone: dict[int, TokenOutput]) -> None:
    for seed, output in alone.items():
        assert list(output.ids) == by_hand(model, prompt_of(seed, 3 + 7 * seed), NUM_IDS)


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16])
def test_prefill_in_any_pieces(
    make_engine: MakeEngine, model: Transformer, alone: dict[int, TokenOutput], budget: int
) -> None:
    engine = make_engine(model, max_num_seqs=1, max_num_batched_tokens=budget)
    for seed in (0, 2, 5):
        output = engine.submit(request("a", prompt_of(seed, 3 + 7 * seed))).result()
        assert_same(output, alone[seed])


@pytest.mark.parametrize(("seqs", "budget", "page_size"), [(2, 5, 1), (3, 64, 3), (6, 9, 64)])
def test_any_company_in_the_batch(
    make_engine: MakeEngine,
    model: Transformer,
    alone: dict[int, TokenOutput],
    seqs: int,
    budget: int,
    page_size: int,
) -> None:
    engine = make_engine(
        model, max_num_seqs=seqs, max_num_batched_tokens=budget, page_size=page_size
    )
    order = random.Random(seqs).sample(range(6), 6)
    handles = {
        seed: engine.submit(request(f"r{seed}", prompt_of(seed, 3 + 7 * seed))) for seed in order
    }
    for seed, handle in handles.items():
        assert_same(handle.result(), alone[seed])


def test_seeded_sampling_is_the_same_in_any_company(
    make_engine: MakeEngine, model: Transformer
) -> None:
    params = {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.3}
    wide = make_engine(model, max_num_seqs=6, max_num_batched_tokens=11)
    narrow = make_engine(model, max_num_seqs=1)
    handles = [
        wide.submit(request(f"r{seed}", prompt_of(seed % 2, 9), seed=seed, **params))
        for seed in range(6)
    ]
    together = [handle.result().ids for handle in handles]
    single = [
        narrow.submit(request("a", prompt_of(seed % 2, 9), seed=seed, **params)).result().ids
        for seed in range(6)
    ]
    assert together == single
    assert len(set(together)) == 6


def test_without_a_seed_runs_differ(make_engine: MakeEngine, model: Transformer) -> None:
    engine = make_engine(model)
    handles = [engine.submit(request(f"r{i}", [1, 2, 3], temperature=1.0)) for i in range(4)]
    assert len({handle.result().ids for handle in handles}) == 4


def poison(engine: Engine) -> None:
    """Fill every slot and page of an idle engine with NaN, except the null page."""
    state = engine._runner.state
    for kda in state._kda.values():
        kda.recurrent_GHKV.fill_(torch.nan)
        kda.conv_GCW.fill_(torch.nan)
    for mla in state._mla.values():
        mla.pages_GLC[NULL_BLOCK + 1 :] = torch.nan


def test_nothing_survives_in_freed_memory(
    make_engine: MakeEngine, model: Transformer, alone: dict[int, TokenOutput]
) -> None:
    engine = make_engine(model, max_num_seqs=2)
    for _ in range(3):
        poison(engine)
        handles = [
            engine.submit(request(f"r{seed}", prompt_of(seed, 3 + 7 * seed))) for seed in (1, 4)
        ]
        for seed, handle in zip((1, 4), handles, strict=True):
            assert_same(handle.result(), alone[seed])


def test_nan_in_one_sequence_stays_there(
    make_engine: MakeEngine, alone: dict[int, TokenOutput]
) -> None:
    model = tiny_model()
    used = {id for seed in (1, 3) for id in (*prompt_of(seed, 3 + 7 * seed), *alone[seed].ids)}
    bad = next(id for id in range(512) if id not in used)
    with torch.no_grad():
        model.embed_tokens.weight[bad] = torch.nan
    engine = make_engine(model, max_num_seqs=3, max_num_batched_tokens=12)
    for _ in range(2):
        handles = [
            engine.submit(request("one", prompt_of(1, 10))),
            engine.submit(request("bad", [5, 6, bad, *range(12)])),
            engine.submit(request("two", prompt_of(3, 24))),
        ]
        outputs = [handle.result() for handle in handles]
        assert_same(outputs[0], alone[1])
        assert outputs[1].finish == "error"
        assert_same(outputs[2], alone[3])
