"""Verification of drafts: the exact law, and the same ids as plain decoding."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.engine import sampling
from moonlet.engine.constraints import assumed, legal_start
from moonlet.engine.request import EngineRequest, SamplingParams, Sequence
from moonlet.engine.sampling import Sampled, Sampler
from moonlet.kernels.sample import reference

# speculative.md section 5.3
P = [(0.6, 0.3, 0.1), (0.2, 0.5, 0.3), (0.4, 0.4, 0.2)]
Q = [(0.3, 0.6, 0.1), (0.5, 0.3, 0.2)]
Law = dict[tuple[int, ...], float]


def sequence(constraint: object = None, output: SequenceOf[int] = (), **params: object) -> Sequence:
    request = EngineRequest(
        request_id="a",
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(**params),
        constraint=constraint,
    )
    made = Sequence(request, max_model_len=1000)
    made.output_ids.extend(output)
    return made


# ---- the token rule, written down from section 5.2 ----------------------------------------------


def token_rule(q_rows: SequenceOf[SequenceOf[float]], drafts: SequenceOf[int]) -> Law:
    """Law of the emitted ids for given drafts: accept with p / q, else the residual."""
    law: Law = Counter()
    reached, accepted = 1.0, ()
    for p, q, draft in zip(P, q_rows, drafts, strict=False):
        accept = min(1.0, p[draft] / q[draft])
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        for id, mass in enumerate(residual):
            if mass:
                law[*accepted, id] += reached * (1 - accept) * mass / sum(residual)
        reached *= accept
        accepted = (*accepted, draft)
    for id, mass in enumerate(P[len(drafts)]):
        law[*accepted, id] += reached * mass
    return law


def mixed(laws: Iterable[tuple[float, Law]]) -> Law:
    """Mix laws by weight."""
    result: Law = Counter()
    for weight, law in laws:
        for ids, mass in law.items():
            result[ids] += weight * mass
    return result


def assert_is_product(law: Law) -> None:
    """First id from row 0; first two from rows 0 and 1, where a second one is emitted or drawn."""
    first: Law = Counter()
    two: Law = Counter()
    for ids, mass in law.items():
        first[ids[:1]] += mass
        if len(ids) > 1:
            two[ids[:2]] += mass
        else:
            for id, share in enumerate(P[1]):
                two[*ids, id] += mass * share
    for a in range(3):
        assert first[a,] == pytest.approx(P[0][a], abs=1e-12)
        for b in range(3):
            assert two[a, b] == pytest.approx(P[0][a] * P[1][b], abs=1e-12)


PAIRS = list(itertools.product(range(3), repeat=2))


def test_the_rule_as_written_here_has_the_numbers_of_the_spec() -> None:
    law = mixed((Q[0][d[0]] * Q[1][d[1]], token_rule(Q, d)) for d in PAIRS)
    numbers = [0.0, 0.0, 0.0]
    for d in PAIRS:
        weight = Q[0][d[0]] * Q[1][d[1]]
        first, second = (min(1.0, P[i][d[i]] / Q[i][d[i]]) for i in (0, 1))
        for count, share in enumerate((1 - first, first * (1 - second), first * second)):
            numbers[count] += weight * share
    assert numbers == pytest.approx([0.30, 0.21, 0.49], abs=1e-12)
    assert sum((count + 1) * share for count, share in enumerate(numbers)) == pytest.approx(2.19)
    assert_is_product(law)


# ---- the rule that runs: one draw per row, accepted where it is the draft -----------------------


def coupled(monkeypatch: pytest.MonkeyPatch, drafts: SequenceOf[int]) -> Law:
    """Law of what `Sampler.choose` returns, by integration over the three uniform numbers.

    A row's choice is constant between borders of its cumulative distribution, so one number from
    inside each interval, weighted with its length, stands for all of it.
    """
    logits = torch.tensor(P, dtype=torch.float64).log()
    sampler = Sampler(3)
    # logits of float64, so that the law is exact
    sampler._sample = reference.sample
    cells = []
    for row in P:
        borders = [0.0, *itertools.accumulate(row)]
        cells.append([((a + b) / 2, b - a) for a, b in itertools.pairwise(borders)])
    owner, law = sequence(output=(7, 7)), Counter()
    for choice in itertools.product(*cells):
        numbers = {2 + row: middle for row, (middle, _) in enumerate(choice)}
        monkeypatch.setattr(sampling, "uniform", lambda seed, place, of=numbers: of[place])
        (chosen,) = sampler.choose(logits, [owner], [drafts])
        law[tuple(c.id for c in chosen)] += math.prod(length for _, length in choice)
    return law


@pytest.mark.parametrize("drafts", PAIRS)
def test_coupling_has_the_law_of_the_token_rule(
    monkeypatch: pytest.MonkeyPatch, drafts: tuple[int, int]
) -> None:
    one_hot = [[float(id == draft) for id in range(3)] for draft in drafts]
    seen, expected = coupled(monkeypatch, drafts), token_rule(one_hot, drafts)
    assert set(seen) == {ids for ids, mass in expected.items() if mass}
    for ids, mass in seen.items():
        assert mass == pytest.approx(expected[ids], abs=1e-12)


def test_coupling_emits_what_plain_decoding_emits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the drafts are, drawn or fixed, the ids have the law of plain decoding."""
    laws = {d: coupled(monkeypatch, d) for d in PAIRS}
    for law in laws.values():
        assert_is_product(law)
    assert_is_product(mixed((Q[0][d[0]] * Q[1][d[1]], law) for d, law in laws.items()))


# ---- the whole pipeline, row by row -------------------------------------------------------------

W = 12


class Alternating:
    """Allows even and odd ids in turn, all but a forbidden one, and is done after some."""

    def __init__(self, length: int = 100, forbidden: int = -1) -> None:
        self.ids: list[int] = []
        self.length, self.forbidden = length, forbidden

    def fill_mask(self, out: np.ndarray) -> None:
        bits = sum(
            1 << id for id in range(W) if id % 2 == len(self.ids) % 2 and id != self.forbidden
        )
        out[0] = bits

    def accept(self, id: int) -> None:
        assert id % 2 == len(self.ids) % 2
        self.ids.append(id)

    def rollback(self, n: int) -> None:
        assert 0 < n <= len(self.ids)
        del self.ids[len(self.ids) - n :]

    def is_done(self) -> bool:
        return len(self.ids) >= self.length


def row_after(ids: SequenceOf[int], seed: int) -> torch.Tensor:
    """Logits as a function of the text, as a model's are."""
    key = hash((seed, *ids)) % (1 << 63)
    return torch.randn(W, generator=torch.Generator().manual_seed(key)) * 2


def plain(owner: Sequence, count: int, seed: int) -> list[Sampled]:
    sampler, chosen = Sampler(W), []
    for _ in range(count):
        (sampled,) = sampler.sample(row_after(owner.output_ids, seed)[None], [owner])
        chosen.append(sampled)
        owner.output_ids.append(sampled.id)
    return chosen


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "top_k": st.sampled_from([0, 4]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "frequency_penalty": st.sampled_from([0.0, 0.9]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.6]),
        "logprobs": st.sampled_from([None, 3]),
        "seed": st.integers(0, 10**6),
    }
)


@settings(deadline=None, max_examples=60)
@given(parameters, st.booleans(), st.integers(0, 5), st.integers(0, 5), st.integers(0, 1000))
def test_a_window_chooses_what_single_steps_choose(
    params: dict[str, object], is_bound: bool, k: int, num_right: int, seed: int
) -> None:
    def owner() -> Sequence:
        return sequence(Alternating() if is_bound else None, **params)

    expected = plain(owner(), k + 1, seed)
    drafts = [choice.id for choice in expected[:k]]
    if num_right < k:
        # two further keeps the constraint's turn, so that the wrong draft is a legal one
        drafts[num_right] = (drafts[num_right] + 2) % W
    num_right = min(num_right, k)
    verified, sampler = owner(), Sampler(W)
    rows = torch.stack([row_after(drafts[:i], seed) for i in range(k + 1)])
    (chosen,) = sampler.choose(rows, [verified], [drafts])
    assert chosen == expected[: num_right + 1]
    assert verified.output_ids == []
    for choice in chosen:
        assert sampler.settle(verified, choice) == choice
        verified.output_ids.append(choice.id)
    if is_bound:
        assert verified.request.constraint.ids == verified.output_ids
    # what follows sees the penalties of every accepted id, and of no other
    after = plain_from(sampler, verified, seed)
    twin = owner()
    plain(twin, num_right + 1, seed)
    assert after == plain_from(Sampler(W), twin, seed)


def plain_from(sampler: Sampler, owner: Sequence, seed: int) -> list[Sampled]:
    return sampler.choose(row_after(owner.output_ids, seed)[None], [owner])[0]


def test_rows_follow_their_sequences_when_windows_differ() -> None:
    logits = torch.zeros(6, W)
    for row, id in enumerate((1, 2, 3, 4, 5, 6)):
        logits[row, id] = 9.0
    owners = [sequence(temperature=0.0) for _ in range(3)]
    chosen = Sampler(W).choose(logits, owners, [(1, 2), (), (5,)])
    assert [[c.id for c in window] for window in chosen] == [[1, 2, 3], [4], [5, 6]]


@pytest.mark.parametrize(("bad_row", "is_reached"), [(0, True), (1, True), (2, False), (3, False)])
def test_only_a_row_that_is_reached_can_fail_its_request(bad_row: int, is_reached: bool) -> None:
    logits = torch.zeros(4, W)
    logits[:, 5] = 9.0
    logits[bad_row, 3] = torch.nan
    # the second draft is wrong: rows 2 and 3 judge a text that does not exist
    (chosen,) = Sampler(W).choose(logits, [sequence(temperature=0.0)], [(5, 4, 5)])
    assert [choice.error is not None for choice in chosen] == [False] * min(bad_row, 1) + (
        [True] if is_reached else [False]
    )


# ---- constraints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "legal"),
    [((0, 1, 2), 3), ((0, 2, 1), 1), ((1,), 0), ((), 0), ((0, 7, 0), 1), ((0, 1, 2, 3, 4), 3)],
)
def test_drafts_end_before_what_the_constraint_forbids_or_completes(
    drafts: tuple[int, ...], legal: int
) -> None:
    constraint = Alternating(length=4, forbidden=7)
    assert legal_start(constraint, drafts, W) == drafts[:legal]
    assert constraint.ids == []


class Breaking(Alternating):
    """Raises in some state."""

    def fill_mask(self, out: np.ndarray) -> None:
        if len(self.ids) == 2:
            raise RuntimeError("no mask")
        super().fill_mask(out)


def test_a_constraint_that_breaks_ahead_breaks_only_there() -> None:
    constraint = Breaking()
    assert legal_start(constraint, (0, 1, 2, 3), W) == (0, 1)
    assert constraint.ids == []
    logits = torch.zeros(3, W)
    logits[:, 0], logits[:, 1] = 2.0, 1.0
    owner = sequence(constraint, temperature=0.0)
    (chosen,) = Sampler(W).choose(logits, [owner], [(0, 1)])
    assert [choice.id for choice in chosen] == [0, 1, -1]
    assert "no mask" in str(chosen[2].error)
    assert constraint.ids == []


def test_assumed_ids_are_undone_when_one_is_refused() -> None:
    constraint = Alternating()
    with pytest.raises(AssertionError), assumed(constraint, (0, 1, 3)):
        pass
    assert constraint.ids == []
