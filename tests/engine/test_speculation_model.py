"""Speculation around a real (tiny) model: the same tokens, and the state of plain decoding."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest
import torch

from moonlet.engine import TokenOutput
from moonlet.engine.emission import emit
from moonlet.engine.limits import SchedulerLimits
from moonlet.engine.memory import MemoryOptions, build_memory
from moonlet.engine.request import EngineRequest, SamplingParams, Sequence
from moonlet.engine.runner import Runner
from moonlet.engine.scheduler import Scheduler
from moonlet.engine.speculative import Speculation
from moonlet.engine.step import Step
from moonlet.model.transformer import Transformer
from moonlet.testing import assert_close, tiny_model
from tests.engine.drafting import (
    Guess,
    GuessDrafter,
    adversary,
    corrupted,
    draft_with,
    oracle,
    speculate,
    unlike,
)
from tests.engine.running import MakeEngine

NUM_IDS = 24
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2])


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model()


def requests(**params: object) -> list[EngineRequest]:
    defaults = {"temperature": 0.0, "max_tokens": NUM_IDS, "ignore_eos": True, "logprobs": 3}
    return [
        EngineRequest(
            request_id=f"r{i}", prompt_ids=prompt, sampling=SamplingParams(**defaults | params)
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def run(
    make_engine: MakeEngine, model: Transformer, wanted: list[EngineRequest]
) -> list[TokenOutput]:
    engine = make_engine(model)
    handles = [engine.submit(one) for one in wanted]
    return [handle.result() for handle in handles]


PARAMS = [
    {},
    {"temperature": 1.0, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.4},
]
GUESSES: dict[str, Callable[[dict[str, tuple[int, ...]]], Guess]] = {
    "right": oracle,
    "wrong": lambda truth: adversary(truth, 512),
    "random": lambda truth: unlike(truth, 512),
    "right up to somewhere": lambda truth: corrupted(truth, 512),
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_tokens_are_those_of_plain_decoding(
    make_engine: MakeEngine, model: Transformer, guess: str, params: dict[str, object]
) -> None:
    wanted = requests(**params)
    expected = run(make_engine, model, wanted)
    truth = {one.request_id: out.ids for one, out in zip(wanted, expected, strict=True)}
    engine = make_engine(model, speculative=speculate(5), max_num_batched_tokens=14)
    draft_with(engine, GUESSES[guess](truth))
    handles = [engine.submit(one) for one in wanted]
    for handle, plain in zip(handles, expected, strict=True):
        output = handle.result()
        assert output.ids == plain.ids
        assert output.finish == plain.finish
        pairs = zip(output.logprobs, plain.logprobs, strict=True)
        assert all(abs(mine.logprob - theirs.logprob) <= 1e-4 for mine, theirs in pairs)


class ByHand:
    """Scheduler, runner and drafts of one sequence, step by step."""

    def __init__(self, model: Transformer, guess: Guess | None, k: int) -> None:
        limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
        self.manager, state = build_memory(
            model.config,
            limits,
            MemoryOptions(page_size=4, unit_size=4, prefix_caching=False),
            stop_ids=(),
            dtype=model.dtype,
            device=model.device,
        )
        self.scheduler = Scheduler(limits, self.manager)
        self.runner = Runner(model, state, unit_size=4)
        self.speculation = None
        if guess is not None:
            self.speculation = Speculation(
                speculate(k),
                max_num_batched_tokens=64,
                stop_ids=frozenset(),
                vocab_size=model.config.vocab_size,
                room=self.manager.window_room,
                drafter=GuessDrafter(guess),
            )
        (one, _) = requests(logprobs=None)
        self.sequence = Sequence(one, max_model_len=64)
        self.scheduler.add(self.sequence)

    def step(self) -> Step:
        step = self.scheduler.schedule()
        assert step is not None
        if self.speculation is not None:
            step = self.speculation.attach(step)
        results = self.runner.execute(step)
        for restore in step.restores:
            self.manager.landed(restore, is_whole=True)
        self.scheduler.advance(step)
        for owner, chosen in results:
            emit(owner, chosen, self.runner.sampler, self.scheduler, frozenset())
        self.runner.commit()
        self.scheduler.check()
        self.runner.check([self.sequence])
        return step

    def until(self, num_ids: int) -> None:
        while len(self.sequence.output_ids) < num_ids:
            self.step()

    def states(self) -> list[torch.Tensor]:
        slot = self.sequence.slot
        arenas = self.runner.state._kda.values()
        return [memory[slot] for kda in arenas for memory in (kda.recurrent_GHKV, kda.conv_GCW)]


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("num_right", range(5))
def test_a_window_leaves_the_state_of_plain_decoding(
    model: Transformer, k: int, num_right: int
) -> None:
    if num_right > k:
        num_right = k
    plain = ByHand(model, None, k)
    plain.until(12)
    truth = list(plain.sequence.output_ids)

    def guess(sequence: Sequence, limit: int) -> SequenceOf[int]:
        start = len(sequence.output_ids)
        if start != 3:
            return []
        ids = truth[start : start + k]
        return ids[:num_right] + [(id + 1) % 512 for id in ids[num_right:]]

    drafted = ByHand(model, guess, k)
    drafted.until(3)
    step = drafted.step()
    assert step.num_tokens == 1 + k
    assert drafted.sequence.output_ids == truth[: 3 + num_right + 1]
    twin = ByHand(model, None, k)
    twin.until(3 + num_right + 1)
    assert drafted.sequence.num_computed == twin.sequence.num_computed
    for mine, theirs in zip(drafted.states(), twin.states(), strict=True):
        assert_close(mine, theirs, atol=1e-5)
    # the rows of rejected drafts are overwritten and never seen
    drafted.until(12)
    assert drafted.sequence.output_ids == truth


def test_two_hundred_random_windows_end_in_the_state_of_plain_decoding(model: Transformer) -> None:
    plain = ByHand(model, None, 1)
    plain.until(NUM_IDS - 1)
    truth = {"r0": [*plain.sequence.output_ids, 0]}
    num_windows = 0
    for seed in range(20):
        drafted = ByHand(model, corrupted(truth, 512, seed), 6)
        while len(drafted.sequence.output_ids) < NUM_IDS - 1:
            num_windows += drafted.step().has_drafts
        extra = len(drafted.sequence.output_ids) - (NUM_IDS - 1)
        assert drafted.sequence.output_ids[: NUM_IDS - 1] == truth["r0"][:-1]
        if not extra:
            for mine, theirs in zip(drafted.states(), plain.states(), strict=True):
                assert_close(mine, theirs, atol=1e-5)
    assert num_windows >= 100
