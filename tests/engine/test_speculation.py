"""Speculation in the engine: the same answers in fewer forward passes, and nothing left behind."""

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch

from moonlet.engine import Engine, EngineRequest, RequestHandle, TokenOutput
from moonlet.model.state import BatchMeta
from moonlet.testing import ScriptedModel, count_up, reply_with
from tests.engine.drafting import (
    Guess,
    adversary,
    corrupted,
    draft_with,
    oracle,
    speculate,
    unlike,
)
from tests.engine.running import END, Gate, MakeEngine, request
from tests.patience import PATIENCE_S

W = 512


def by_text(prompt: SequenceOf[int], output: SequenceOf[int]) -> torch.Tensor:
    """Logits that depend on the whole text; the end id is unlikely, but possible."""
    key = hash((tuple(prompt), tuple(output))) % (1 << 63)
    logits_W = torch.full((W,), -9.0)
    logits_W[:40] = torch.randn(40, generator=torch.Generator().manual_seed(key)) * 2
    logits_W[END] = 0.5
    return logits_W


def run(engine: Engine, wanted: SequenceOf[EngineRequest]) -> list[TokenOutput]:
    return [handle.result() for handle in [engine.submit(one) for one in wanted]]


def requests(**params: object) -> list[EngineRequest]:
    return [
        request(f"r{i}", [i, 2, 3][: 1 + i % 3], max_tokens=5 + 6 * i, **params) for i in range(4)
    ]


def truth_of(make_engine: MakeEngine, wanted: list[EngineRequest]) -> dict[str, TokenOutput]:
    outputs = run(make_engine(ScriptedModel(by_text)), wanted)
    return {one.request_id: output for one, output in zip(wanted, outputs, strict=True)}


GUESSES: dict[str, Callable[[dict[str, tuple[int, ...]]], Guess]] = {
    "right": oracle,
    "wrong": lambda truth: adversary(truth, W),
    "random": lambda truth: unlike(truth, W),
    "right up to somewhere": lambda truth: corrupted(truth, W),
}
PARAMS: dict[str, dict[str, object]] = {
    "greedy": {"logprobs": 2},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 11, "logprobs": 0},
    "penalties": {
        "temperature": 0.8,
        "seed": 5,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "beyond the end": {"ignore_eos": True, "temperature": 1.0, "seed": 2},
    "own stop ids": {"temperature": 1.0, "seed": 3, "stop_token_ids": frozenset(range(8))},
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("k", [1, 4])
def test_answers_are_those_of_plain_decoding(
    make_engine: MakeEngine, params: str, guess: str, k: int
) -> None:
    expected = truth_of(make_engine, requests(**PARAMS[params]))
    engine = make_engine(ScriptedModel(by_text), speculative=speculate(k))
    draft_with(engine, GUESSES[guess]({name: out.ids for name, out in expected.items()}))
    outputs = run(engine, requests(**PARAMS[params]))
    assert outputs == list(expected.values())
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    if guess == "wrong":
        assert stats.num_accepted_tokens == 0
    if guess == "right":
        assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.parametrize("k", [1, 3, 7])
def test_an_oracle_divides_the_forward_passes(make_engine: MakeEngine, k: int) -> None:
    model = ScriptedModel(count_up())
    engine = make_engine(model, speculative=speculate(k))
    truth = [(3 + 1 + i) % 256 for i in range(41)]
    draft_with(engine, oracle({"a": truth}))
    output = engine.submit(request("a", max_tokens=41)).result()
    assert list(output.ids) == truth
    # the prompt gives one token, every window k + 1, the last one what is left
    assert model.num_forward_calls == 1 + -(-40 // (k + 1))
    stats = engine.stats()
    assert stats.num_forward_calls == model.num_forward_calls
    assert stats.num_generated_tokens == 41
    assert stats.num_prompt_tokens == 3


def test_an_adversary_costs_no_forward_pass(make_engine: MakeEngine) -> None:
    model = ScriptedModel(count_up())
    engine = make_engine(model, speculative=speculate(5))
    draft_with(engine, adversary({"a": range(4, 30)}, 256))
    assert len(engine.submit(request("a", max_tokens=20)).result().ids) == 20
    assert model.num_forward_calls == 20


def test_counters_agree_with_each_other(make_engine: MakeEngine) -> None:
    expected = truth_of(make_engine, requests(ignore_eos=True))
    engine = make_engine(ScriptedModel(by_text), speculative=speculate(6))
    truth = {name: output.ids for name, output in expected.items()}
    draft_with(engine, corrupted(truth, W, seed=3))
    run(engine, requests(ignore_eos=True))
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert 0 < stats.num_drafts < stats.num_draft_tokens
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert len(stats.num_accepted_tokens_per_pos) == 6
    assert list(stats.num_accepted_tokens_per_pos) == sorted(
        stats.num_accepted_tokens_per_pos, reverse=True
    )
    assert stats.num_accepted_tokens_per_pos[0] <= stats.num_drafts


def test_without_speculation_there_is_nothing_to_count(make_engine: MakeEngine) -> None:
    engine = make_engine(ScriptedModel(count_up()))
    engine.submit(request("a", max_tokens=5)).result()
    stats = engine.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (0, 0, 0)
    assert stats.num_accepted_tokens_per_pos == ()


# ---- where a window ends -----------------------------------------------------------------------


def test_a_stop_id_inside_a_window_ends_it(make_engine: MakeEngine) -> None:
    rows: list[int] = []
    model = ScriptedModel(
        reply_with([5, 6, 7], END), before_forward=lambda meta: rows.extend(meta.seq_lens)
    )
    engine = make_engine(model, speculative=speculate(8))
    draft_with(engine, oracle({"a": [5, 6, 7, END, 9, 9, 9, 9, 9, 9]}))
    output = engine.submit(request("a")).result()
    assert (output.ids, output.finish) == ((5, 6, 7, END), "stop")
    # prompt, then one window without rows for the end id and what was drafted after it
    assert rows == [3, 3]


def test_ignored_stop_ids_are_drafted(make_engine: MakeEngine) -> None:
    model = ScriptedModel(reply_with([5, 6], END))
    engine = make_engine(model, speculative=speculate(4))
    draft_with(engine, oracle({"a": [5, 6, END, END, END, END, END]}))
    output = engine.submit(request("a", ignore_eos=True, max_tokens=6)).result()
    assert (output.ids, output.finish) == ((5, 6, END, END, END, END), "length")
    assert model.num_forward_calls == 2


@pytest.mark.parametrize("limits", [{"max_tokens": 7}, {}])
def test_no_row_is_written_beyond_the_reservation(
    make_engine: MakeEngine, limits: dict[str, int]
) -> None:
    farthest: list[int] = []

    def note(meta: BatchMeta) -> None:
        lengths = zip(meta.start_positions_S.tolist(), meta.seq_lens, strict=True)
        farthest.append(max(start + length for start, length in lengths))

    model = ScriptedModel(count_up(), before_forward=note)
    engine = make_engine(model, max_model_len=16, speculative=speculate(12))
    total = 3 + limits.get("max_tokens", 13)
    for guess in (oracle({"a": range(4, 40)}), adversary({"a": range(4, 40)}, 256)):
        draft_with(engine, guess)
        output = engine.submit(request("a", **limits)).result()
        assert (len(output.ids), output.finish) == (total - 3, "length")
    # the last token of a request is never computed
    assert max(farthest) == total - 1


def test_drafts_take_the_tokens_that_prompts_leave(make_engine: MakeEngine) -> None:
    rows: list[int] = []
    gate = Gate()

    def note(meta: BatchMeta) -> None:
        rows.append(meta.ragged.num_rows)
        gate(meta)

    model = ScriptedModel(count_up(), before_forward=note)
    engine = make_engine(model, max_num_batched_tokens=8, speculative=speculate(6))
    draft_with(engine, oracle({"a": range(4, 60), "b": range(101, 160)}))
    first = engine.submit(request("a", max_tokens=30))
    gate.wait_until_inside()
    second = engine.submit(request("b", range(90, 101), max_tokens=30))
    gate.open()
    assert list(first.result().ids) == list(range(4, 34))
    assert list(second.result().ids) == list(range(101, 131))
    assert max(rows) == 8
    # prompt, one decode row beside 7 and then 4 prompt rows, which leave 0 and 3 drafts
    assert rows[:3] == [3, 8, 8]


class Turns:
    """Allows even and odd ids below 100 in turn, and is done after some."""

    def __init__(self, count: int) -> None:
        self.ids: list[int] = []
        self.count = count

    def fill_mask(self, out: np.ndarray) -> None:
        out[:3] = -0x55555556 if len(self.ids) % 2 else 0x55555555

    def accept(self, id: int) -> None:
        assert id % 2 == len(self.ids) % 2
        assert len(self.ids) < self.count
        self.ids.append(id)

    def rollback(self, n: int) -> None:
        del self.ids[len(self.ids) - n :]

    def is_done(self) -> bool:
        return len(self.ids) == self.count


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_hold_in_every_row(
    make_engine: MakeEngine, guess: str, temperature: float
) -> None:
    params = {"temperature": temperature, "seed": 8}
    plain = make_engine(ScriptedModel(by_text))
    alone = Turns(17)
    expected = plain.submit(request("a", constraint=alone, **params)).result()
    assert (len(expected.ids), expected.finish) == (17, "stop")
    engine = make_engine(ScriptedModel(by_text), speculative=speculate(5))
    draft_with(engine, GUESSES[guess]({"a": expected.ids}))
    constraint = Turns(17)
    # a neighbour with other windows must not shift the masks
    free = engine.submit(request("b", max_tokens=17))
    output = engine.submit(request("a", constraint=constraint, **params)).result()
    assert output == expected
    assert constraint.ids == alone.ids == list(expected.ids)
    assert free.result() == plain.submit(request("b", max_tokens=17)).result()


def test_illegal_drafts_are_not_computed(make_engine: MakeEngine) -> None:
    model = ScriptedModel(lambda prompt, output: torch.arange(512.0))
    engine = make_engine(model, speculative=speculate(4))
    draft_with(engine, lambda sequence, limit: [0, 1, 3, 4][:limit])
    output = engine.submit(request("a", constraint=Turns(9))).result()
    assert output.ids == (*(94, 95) * 4, 94)
    # after 94 (odd comes next) nothing is legal; after 95 the drafts 0 and 1 are
    assert engine.stats().num_draft_tokens == 2 * engine.stats().num_drafts > 0


# ---- failures ----------------------------------------------------------------------------------


def test_a_row_without_distribution_fails_its_request_when_it_is_reached(
    make_engine: MakeEngine,
) -> None:
    def script(prompt: SequenceOf[int], output: SequenceOf[int]) -> torch.Tensor | int:
        return torch.full((W,), torch.nan) if list(output[-1:]) == [13] else 7

    engine = make_engine(ScriptedModel(script), speculative=speculate(3))
    # a wrong draft leads to a row that is never reached
    draft_with(engine, lambda sequence, limit: [7, 13, 13][:limit])
    output = engine.submit(request("a", max_tokens=9)).result()
    assert (output.ids, output.finish) == ((7,) * 9, "length")

    def bad_fifth(prompt: SequenceOf[int], output: SequenceOf[int]) -> torch.Tensor | int:
        return torch.full((W,), torch.nan) if len(output) == 4 else 7

    engine = make_engine(ScriptedModel(bad_fifth), speculative=speculate(5))
    draft_with(engine, lambda sequence, limit: [7] * limit)
    handles = [engine.submit(request(name, max_tokens=9)) for name in "ab"]
    for handle in handles:
        output = handle.result()
        assert (output.ids, output.finish) == ((7,) * 4, "error")
        assert "no finite distribution" in str(output.error)


def test_a_failing_window_leaves_nothing_open(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def boom(meta: BatchMeta) -> None:
        if any(meta.tentative) and model.num_forward_calls == 4:
            arena = engine._runner.state._kda[0]
            arena._pending = (arena.recurrent_GHKV[:1], arena.conv_GCW[:1])
            raise RuntimeError("boom")

    model = ScriptedModel(count_up(), before_forward=boom)
    engine = make_engine(model, speculative=speculate(2))
    draft_with(engine, oracle({"a": range(4, 40), "b": range(4, 40)}))
    assert engine.submit(request("a", max_tokens=20)).result().finish == "error"
    assert len(engine.submit(request("b", max_tokens=20)).result().ids) == 20
    assert "boom" in caplog.text
    engine.check()


def test_a_failing_drafter_ends_the_step_and_not_the_engine(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def guess(sequence: object, limit: int) -> list[int]:
        raise RuntimeError("no idea")

    engine = make_engine(ScriptedModel(count_up()), speculative=speculate(2))
    draft_with(engine, guess)
    output = engine.submit(request("a", max_tokens=5)).result()
    assert (output.ids, output.finish) == ((4,), "error")
    draft_with(engine, lambda sequence, limit: [])
    assert len(engine.submit(request("b", max_tokens=5)).result().ids) == 5
    assert "no idea" in caplog.text


def test_abort_between_windows(make_engine: MakeEngine) -> None:
    gate = Gate()
    model = ScriptedModel(count_up(), before_forward=gate)
    engine = make_engine(model, speculative=speculate(3))
    draft_with(engine, oracle({"a": range(4, 60), "b": range(4, 60)}))
    handles = [engine.submit(request(name, max_tokens=40)) for name in "ab"]
    gate.let(2)
    for _ in range(3):
        gate.wait_until_inside()
    handles[0].abort()
    gate.open()
    assert handles[0].result().finish == "abort"
    assert list(handles[1].result().ids) == list(range(4, 44))
    engine.check()


def test_two_hundred_rounds_of_everything(make_engine: MakeEngine) -> None:
    """Random drafts of random lengths, requests that come, end and are aborted."""
    generator = random.Random(4)
    model = ScriptedModel(count_up())
    engine = make_engine(model, max_model_len=200, speculative=speculate(7))
    draft_with(engine, corrupted({f"r{i}": range(4, 300) for i in range(60)}, 256))
    handles: list[RequestHandle] = []
    checked: set[str] = set()

    def check(handle: RequestHandle) -> None:
        if handle.request_id not in checked:
            checked.add(handle.request_id)
            ids = list(handle.result().ids)
            assert ids == list(range(4, 4 + len(ids)))

    for i in range(60):
        handles.append(engine.submit(request(f"r{i}", max_tokens=generator.randint(1, 100))))
        if generator.random() < 0.2:
            generator.choice(handles).abort()
        if generator.random() < 0.3:
            check(generator.choice(handles))
    for handle in handles:
        check(handle)
    assert model.num_forward_calls > 200


# ---- the drafters that ship ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        {"method": "ngram", "prompt_lookup_min": 2},
        {"method": "suffix"},
    ],
    ids=["ngram", "suffix"],
)
@pytest.mark.parametrize("adaptive", [False, True])
def test_text_that_repeats_takes_fewer_passes(
    make_engine: MakeEngine, raw: dict[str, object], adaptive: bool
) -> None:
    reply = [5, 6, 7, 8, 9, 10] * 9
    config = speculate(4).from_dict(raw | {"num_speculative_tokens": 4, "adaptive": adaptive})
    model = ScriptedModel(reply_with(reply, END))
    engine = make_engine(model, speculative=config)
    output = engine.submit(request("a")).result()
    assert output.ids == (*reply, END)
    if adaptive:
        # how much is drafted is the clock's decision here; tests of the control have their own
        assert model.num_forward_calls <= len(output.ids)
    else:
        assert model.num_forward_calls < 25


def test_suffix_drafting_learns_from_finished_answers(make_engine: MakeEngine) -> None:
    config = speculate(4).from_dict({"method": "suffix", "adaptive": False})
    model = ScriptedModel(reply_with(range(20, 60), END))
    engine = make_engine(model, speculative=config)
    engine.submit(request("a", [1])).result()
    first = model.num_forward_calls
    assert first == 41
    engine.submit(request("b", [2])).result()
    assert model.num_forward_calls - first < 15


def test_an_aborted_stream_of_windows_wakes_its_reader(make_engine: MakeEngine) -> None:
    model = ScriptedModel(count_up())
    engine = make_engine(model, speculative=speculate(3))
    draft_with(engine, oracle({"a": [(4 + i) % 256 for i in range(80)]}))
    handle = engine.submit(request("a"))
    seen = []
    for output in handle:
        seen.extend(output.ids)
        if len(seen) > 10:
            break
    assert seen == list(range(4, 4 + len(seen)))
    engine.close(drain=True, timeout_s=PATIENCE_S)
