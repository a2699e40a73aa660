"""Sampling against a plain float64 reference, draws, penalties, constraints, failing rows."""

import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.engine.request import EngineRequest, SamplingParams, Sequence
from moonlet.engine.sampling import PenaltyCounts, Sampler, filters_of, uniform
from moonlet.kernels.sample import reference
from moonlet.kernels.sample.reference import draw
from moonlet.testing import assert_close

W = 50


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, W, generator=generator) * scale


def sequence(
    name: str = "a",
    prompt: SequenceOf[int] = (1, 2, 3),
    output: SequenceOf[int] = (),
    constraint: object = None,
    **params: object,
) -> Sequence:
    request = EngineRequest(
        request_id=name,
        prompt_ids=prompt,
        sampling=SamplingParams(**params),
        constraint=constraint,
    )
    made = Sequence(request, max_model_len=1000)
    made.output_ids.extend(output)
    return made


def distribution(logits: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    return reference.distribution(logits, filters_of(params, logits.shape[1]))


# ---- the reference: one id at a time, plain numbers -----------------------------------------


def reference_penalties(
    logits: list[float], prompt: SequenceOf[int], output: SequenceOf[int], params: SamplingParams
) -> list[float]:
    result = []
    for id, value in enumerate(logits):
        if id in set(prompt) | set(output):
            repetition = params.repetition_penalty
            value = value / repetition if value > 0 else value * repetition
        count = list(output).count(id)
        value -= params.frequency_penalty * count
        value -= params.presence_penalty * (count > 0)
        result.append(value)
    return result


def reference_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    scaled = [value / params.temperature for value in logits]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    total = math.fsum(weights)
    weights = [weight / total for weight in weights]
    floor = params.min_p * max(weights)
    weights = [0.0 if weight < floor else weight for weight in weights]
    order = sorted(range(len(weights)), key=lambda id: (-weights[id], id))
    if params.top_k > 0:
        order = order[: params.top_k]
    kept, mass, target = [], 0.0, params.top_p * math.fsum(weights[id] for id in order)
    for id in order:
        kept.append(id)
        mass += weights[id]
        if params.top_p < 1 and mass >= target:
            break
    total = math.fsum(weights[id] for id in kept)
    return [weights[id] / total if id in kept else 0.0 for id in range(len(weights))]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 3.0),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, W, 10_000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@settings(max_examples=60)
@given(st.lists(params_strategy, min_size=1, max_size=4), st.integers(0, 1000))
def test_distribution_equals_the_reference(params: list[SamplingParams], seed: int) -> None:
    logits = random_logits(len(params), seed)
    logits[0, 3] = -math.inf
    expected = [
        reference_distribution(row, p) for row, p in zip(logits.tolist(), params, strict=True)
    ]
    actual = distribution(logits, params)
    assert actual.dtype == torch.float64
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert_close(actual, wanted, atol=1e-12)
    assert torch.equal(actual > 0, wanted > 0)


def test_ties_at_the_cut_keep_the_lower_id() -> None:
    logits = torch.zeros(1, 8)
    kept = distribution(logits, [SamplingParams(top_k=3)])[0]
    assert kept.nonzero().flatten().tolist() == [0, 1, 2]
    kept = distribution(logits, [SamplingParams(top_p=0.5)])[0]
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_tiny_temperature_does_not_overflow() -> None:
    logits = random_logits(1, scale=1e4)
    probabilities = distribution(logits, [SamplingParams(temperature=1e-30)])
    assert probabilities[0, logits[0].argmax()] == 1.0


@settings(max_examples=60)
@given(
    repetition=st.sampled_from([1.0, 0.5, 1.3, 3.0]),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    prompt=st.lists(st.integers(0, W - 1), min_size=1, max_size=6),
    output=st.lists(st.integers(0, W - 1), max_size=12),
)
def test_penalties_equal_the_reference(
    repetition: float, frequency: float, presence: float, prompt: list[int], output: list[int]
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    logits = random_logits(1, len(output))[0]
    actual = PenaltyCounts(W, prompt, output).apply(logits, params)
    expected = reference_penalties(logits.tolist(), prompt, output, params)
    assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-5)


def test_penalties_follow_the_output_across_steps() -> None:
    owner = sequence(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5)
    sampler, logits = Sampler(W), torch.zeros(1, W)
    logits[0, :3] = torch.tensor([5.0, 4.0, 3.0])
    ids = []
    for _ in range(6):
        ids.append(sampler.sample(logits, [owner])[0].id)
        owner.output_ids.append(ids[-1])
    # 5 | 3.5, 4 | 3.5, 2.5, 3 | 2.5, 2.5, 3 | 2.5, 2.5, 1.5 | 1.5, 2.5, 1.5
    assert ids == [0, 1, 0, 2, 0, 1]
    assert sampler.tracked() == {"a"}
    sampler.forget(owner)
    assert not sampler.tracked()


# ---- draws ------------------------------------------------------------------------------------


def test_draw_has_the_exact_law() -> None:
    # an even grid of uniforms must hit every id in proportion, up to one cell
    cells = 1000
    probabilities = distribution(random_logits(1, 5), [SamplingParams(top_k=9)])
    grid = [(cell + 0.5) / cells for cell in range(cells)]
    ids = draw(probabilities.expand(cells, W), grid)
    counts = torch.bincount(ids, minlength=W)
    assert ((counts - probabilities[0] * cells).abs() <= 1).all()
    assert (counts[probabilities[0] == 0] == 0).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_draw_never_takes_an_impossible_id(number: float) -> None:
    probabilities = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64)
    assert draw(probabilities, [number]).tolist() == [1 if number == 0 else 3]


def test_uniform_depends_on_seed_and_position_only() -> None:
    numbers = [uniform(seed, position) for seed in range(-5, 50) for position in range(40)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert abs(np.var(numbers) - 1 / 12) < 0.005
    assert uniform(-1, 3) == uniform((1 << 64) - 1, 3)


def test_uniform_never_changes_between_releases() -> None:
    assert uniform(0, 0) == 0.0564663990004608
    assert uniform(42, 7) == 0.8614033402518924


# ---- the sampler ------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.zeros(2, W)
    logits[1, [7, 20, 33]] = 2.0
    result = Sampler(W).sample(logits, [sequence("a", temperature=0), sequence("b", temperature=0)])
    assert [sampled.id for sampled in result] == [0, 7]


def test_mixed_batch_equals_each_request_alone() -> None:
    owners = [
        sequence("greedy", temperature=0.0),
        sequence("plain", temperature=1.0, seed=1),
        sequence("cut", temperature=1.5, seed=2, top_p=0.8, top_k=20),
        sequence("floor", temperature=0.7, seed=3, min_p=0.05, output=[4, 4, 9]),
        sequence("penalty", temperature=0.0, repetition_penalty=4.0, prompt=range(10)),
        sequence("both", temperature=1.0, seed=4, frequency_penalty=1.0, output=[4, 4, 9]),
    ]
    logits = random_logits(len(owners), 8)
    together = [sampled.id for sampled in Sampler(W).sample(logits, owners)]
    alone = [
        Sampler(W).sample(logits[row : row + 1], [owner])[0].id for row, owner in enumerate(owners)
    ]
    assert together == alone
    shuffled = [3, 5, 0, 2, 4, 1]
    again = Sampler(W).sample(logits[shuffled], [owners[row] for row in shuffled])
    assert [sampled.id for sampled in again] == [together[row] for row in shuffled]


def test_cached_parameters_follow_the_batch() -> None:
    sampler = Sampler(W)
    for seed in range(10):
        logits = random_logits(2, seed)
        hot = sequence("hot", temperature=5.0, seed=seed)
        cold = sequence("cold", temperature=1e-6, seed=seed)
        for owners in ([hot, cold], [cold, hot], [cold, hot]):
            expected = [sampled.id for sampled in Sampler(W).sample(logits, owners)]
            assert [sampled.id for sampled in sampler.sample(logits, owners)] == expected


def test_each_position_has_its_own_draw() -> None:
    owner, sampler = sequence(temperature=1.0, seed=3), Sampler(W)
    for _ in range(20):
        owner.output_ids.append(sampler.sample(torch.zeros(1, W), [owner])[0].id)
    assert owner.output_ids == [int(uniform(3, position) * W) for position in range(20)]
    assert len(set(owner.output_ids)) > 10


def test_cached_parameters_end_with_their_request() -> None:
    sampler, logits = Sampler(W), random_logits(1, 3)
    hot = sequence("a", temperature=1e6, seed=1)
    assert sampler.sample(logits, [hot])[0].id != int(logits.argmax())
    sampler.forget(hot)
    cold = sequence("a", temperature=1e-6, seed=1)
    assert sampler.sample(logits, [cold])[0].id == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overflowing_penalty_fails_alone(temperature: float) -> None:
    logits = random_logits(3, 4)
    best = logits.argmax(dim=1).tolist()
    owners = [
        sequence("a", temperature=temperature, top_k=1),
        sequence("b", best[1:2], temperature=temperature, repetition_penalty=1e-300),
        sequence("c", temperature=temperature, top_k=1),
    ]
    result = Sampler(W).sample(logits, owners)
    assert [sampled.error is None for sampled in result] == [True, False, True]
    assert "penalties" in str(result[1].error)
    assert [result[0].id, result[2].id] == [best[0], best[2]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_row_fails_alone(bad: float, temperature: float) -> None:
    owners = [sequence(name, temperature=temperature, seed=5) for name in "abc"]
    logits = random_logits(3, 4)
    clean = [sampled.id for sampled in Sampler(W).sample(logits, owners)]
    logits[1, 17] = bad
    result = Sampler(W).sample(logits, owners)
    assert [sampled.error is None for sampled in result] == [True, False, True]
    assert [result[0].id, result[2].id] == [clean[0], clean[2]]
    logits[1] = -math.inf
    assert Sampler(W).sample(logits, owners)[1].error is not None


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3, 6)
    owners = [
        sequence("a", temperature=0.3, seed=1, logprobs=0, repetition_penalty=2.0),
        sequence("b", temperature=0.0),
        sequence("c", temperature=0.0, logprobs=4),
    ]
    untouched = logits.clone()
    result = Sampler(W).sample(logits, owners)
    assert torch.equal(logits, untouched)
    expected = torch.log_softmax(logits.double(), dim=1)
    assert result[1].logprobs is None
    first, last = result[0].logprobs, result[2].logprobs
    assert first is not None
    assert last is not None
    assert first.top == ()
    assert first.id == result[0].id
    assert first.logprob == pytest.approx(float(expected[0, first.id]), abs=1e-12)
    values, ids = expected[2].topk(4)
    assert [id for id, _ in last.top] == ids.tolist()
    assert [value for _, value in last.top] == pytest.approx(values.tolist(), abs=1e-12)
    assert (last.id, last.logprob) == last.top[0]


# ---- constraints ------------------------------------------------------------------------------


class Allow:
    """Allows a fixed set of ids."""

    def __init__(self, allowed: set[int]) -> None:
        self.allowed = allowed
        self.accepted: list[int] = []

    def fill_mask(self, out: np.ndarray) -> None:
        assert out.shape == ((W + 31) // 32,)
        for id in self.allowed:
            out[id // 32] |= np.uint32(1 << id % 32).view(np.int32)

    def accept(self, id: int) -> None:
        if id == 13:
            raise ValueError("unlucky")
        self.accepted.append(id)

    def rollback(self, n: int) -> None:
        del self.accepted[len(self.accepted) - n :]

    def is_done(self) -> bool:
        return False


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_constraint_masks_its_own_row_only(temperature: float) -> None:
    logits = random_logits(2, 9)
    allowed = {5, 31, 32, 49}
    owners = [
        sequence("free", temperature=0.0),
        sequence("bound", temperature=temperature, seed=3, constraint=Allow(allowed)),
    ]
    result = Sampler(W).sample(logits, owners)
    assert result[0].id == int(logits[0].argmax())
    assert result[1].id in allowed
    assert owners[1].request.constraint.accepted == [result[1].id]
    if temperature == 0.0:
        assert result[1].id == max(allowed, key=lambda id: float(logits[1, id]))


@pytest.mark.parametrize("allowed", [set(), {13}])
def test_failing_constraint_fails_its_request_only(allowed: set[int]) -> None:
    owners = [
        sequence("free", temperature=0.0),
        sequence("bound", temperature=0.0, constraint=Allow(allowed)),
    ]
    result = Sampler(W).sample(random_logits(2, 9), owners)
    assert result[0].error is None
    assert "constraint" in str(result[1].error)
