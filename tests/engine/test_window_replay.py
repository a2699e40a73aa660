"""Verification windows from a tape: ids, states and rows have the bits of single calls."""

import pytest
import torch

from moonlet.engine.emission import emit
from moonlet.engine.limits import SchedulerLimits
from moonlet.engine.memory import MemoryOptions, build_memory
from moonlet.engine.replay import _WindowStep
from moonlet.engine.request import EngineRequest, SamplingParams, Sequence
from moonlet.engine.runner import Runner
from moonlet.engine.scheduler import Scheduler
from moonlet.engine.speculative import Speculation
from moonlet.engine.step import Step
from moonlet.kernels import _native
from moonlet.kernels.ragged import Ragged
from moonlet.model.transformer import Transformer
from moonlet.testing import ScriptedModel, count_up
from moonlet.weights.checkpoint import load_for_inference
from tests.engine.drafting import Guess, GuessDrafter, corrupted, draft_with, oracle, speculate
from tests.engine.running import MakeEngine, request
from tests.engine.test_replay import Together, requests
from tests.model import golden

needs_native = pytest.mark.skipif(not _native.isa_levels(), reason="native kernels are not built")
LENGTH, DRAFTS = 96, 6


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_for_inference(golden.checkpoint_dir("tiny_k3")).model


class ByHand:
    """Scheduler, runner and drafts of some sequences, step by step."""

    def __init__(
        self,
        model: Transformer,
        guess: Guess | None,
        *,
        num_seqs: int,
        replays: bool,
        **params: object,
    ) -> None:
        limits = SchedulerLimits(
            max_num_seqs=num_seqs, max_num_batched_tokens=64, max_model_len=LENGTH
        )
        self.manager, self.state = build_memory(
            model.config,
            limits,
            MemoryOptions(page_size=4, unit_size=4, prefix_caching=False),
            stop_ids=(),
            dtype=model.dtype,
            device=model.device,
        )
        self.scheduler = Scheduler(limits, self.manager)
        self.runner = Runner(model, self.state, unit_size=4, replay_decode=replays)
        self.speculation = Speculation(
            speculate(DRAFTS),
            max_num_batched_tokens=64,
            stop_ids=frozenset(),
            vocab_size=model.config.vocab_size,
            room=self.manager.window_room,
            drafter=GuessDrafter(guess or (lambda sequence, limit: [])),
        )
        defaults = {"temperature": 0.0, "ignore_eos": True, "seed": 1}
        self.sequences = []
        for i in range(num_seqs):
            prompt = [(7 * i + j) % 50 for j in range(3 + 2 * i)]
            sampling = SamplingParams(**{**defaults, **params})
            one = EngineRequest(request_id=f"r{i}", prompt_ids=prompt, sampling=sampling)
            self.sequences.append(Sequence(one, max_model_len=LENGTH))
            self.scheduler.add(self.sequences[-1])

    def compute(self) -> tuple[Step, list]:
        step = self.scheduler.schedule()
        assert step is not None
        step = self.speculation.attach(step)
        return step, self.runner.execute(step)

    def step(self) -> Step:
        step, results = self.compute()
        for restore in step.restores:
            self.manager.landed(restore, is_whole=True)
        self.scheduler.advance(step)
        for owner, chosen in results:
            emit(owner, chosen, self.runner.sampler, self.scheduler, frozenset())
        self.runner.commit()
        self.runner.check(self.sequences)
        return step

    def until(self, num_ids: int) -> list[Step]:
        steps = []
        while min(len(s.output_ids) for s in self.sequences) < num_ids:
            steps.append(self.step())
        return steps

    def bytes(self) -> list[torch.Tensor]:
        """States and rows of all sequences."""
        states = [self.state.read_slot(s.slot) for s in self.sequences]
        return states + [self.state.read_rows(s.pages, 0, s.num_computed) for s in self.sequences]


def truth_of(model: Transformer, num_seqs: int, **params: object) -> dict[str, tuple[int, ...]]:
    plain = ByHand(model, None, num_seqs=num_seqs, replays=False, **params)
    plain.until(60)
    return {s.request_id: tuple(s.output_ids) for s in plain.sequences}


@needs_native
@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3}],
    ids=["greedy", "sampled"],
)
def test_every_step_has_the_bits_of_single_calls(
    model: Transformer, num_seqs: int, params: dict[str, object]
) -> None:
    truth = truth_of(model, num_seqs, **params)
    num_windows = num_replays = 0
    for seed in range(6):
        pair = [
            ByHand(model, corrupted(truth, 512, seed), num_seqs=num_seqs, replays=replays, **params)
            for replays in (True, False)
        ]
        taped, single = pair
        while min(len(s.output_ids) for s in taped.sequences) < 40:
            steps = [one.step() for one in pair]
            assert [c.drafts for c in steps[0].chunks] == [c.drafts for c in steps[1].chunks]
            num_windows += steps[0].has_drafts
            for mine, theirs in zip(taped.sequences, single.sequences, strict=True):
                assert mine.output_ids == theirs.output_ids
                assert mine.num_computed == theirs.num_computed
            for mine, theirs in zip(taped.bytes(), single.bytes(), strict=True):
                assert torch.equal(mine, theirs)
        num_replays += taped.runner.num_replays
        assert single.runner.num_replays == 0
    assert num_windows > 60
    assert num_replays > 40


@needs_native
def test_one_tape_serves_every_way_to_share_out_its_rows(model: Transformer) -> None:
    truth = truth_of(model, 2)
    lengths = iter([(3, 1), (1, 3), (4, 0), (0, 4), (2, 2)] * 3)
    current: dict[str, int] = {}

    def guess(sequence: Sequence, limit: int) -> list[int]:
        if sequence.request_id == "r0":
            current["r0"], current["r1"] = next(lengths)
        count = min(limit, current[sequence.request_id])
        return list(oracle(truth)(sequence, count))

    taped = ByHand(model, guess, num_seqs=2, replays=True)
    taped.until(24)
    shapes = list(taped.runner._replay._steps)
    assert [shape.num_rows for shape in shapes] == [6]
    for s in taped.sequences:
        assert tuple(s.output_ids) == truth[s.request_id][: len(s.output_ids)]


@needs_native
def test_an_abandoned_window_leaves_no_trace(model: Transformer) -> None:
    truth = truth_of(model, 2)
    taped = ByHand(model, oracle(truth), num_seqs=2, replays=True)
    taped.until(20)
    for _ in range(2):
        before = taped.bytes()
        step, _ = taped.compute()
        assert step.has_drafts
        assert taped.runner._replay.is_open
        taped.runner.abandon()
        assert not taped.runner._replay.is_open
        assert all(map(torch.equal, before, taped.bytes()))
    # a shape that was never committed is not kept
    fresh = ByHand(model, oracle(truth), num_seqs=2, replays=True)
    fresh.step()
    step, _ = fresh.compute()
    assert step.has_drafts
    fresh.runner.abandon()
    assert not fresh.runner._replay._steps
    fresh.until(30)
    assert tuple(fresh.sequences[0].output_ids[:30]) == truth["r0"][:30]


@needs_native
def test_windows_of_the_engine_replay(make_engine: MakeEngine, model: Transformer) -> None:
    wanted = requests(model, 4, repetition_penalty=1.1)
    expected = Together(make_engine, model, replay_decode=False).run(wanted)
    truth = {one.request_id: out.ids for one, out in zip(wanted, expected, strict=True)}
    outputs = []
    for replays in (True, False):
        engine = Together(make_engine, model, speculative=speculate(4), replay_decode=replays)
        for seed in range(3):
            draft_with(engine.engine, corrupted(truth, 512, seed))
            outputs.append(engine.run(wanted))
        kinds = {type(step) for step in engine.engine._runner._replay._steps.values()}
        assert (_WindowStep in kinds) is replays
    for mine, theirs in zip(outputs[:3], outputs[3:], strict=True):
        assert mine == theirs
        assert [out.ids for out in mine] == [out.ids for out in expected]


def test_what_computes_in_torch_is_refused_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    model = ScriptedModel(count_up())
    engine = make_engine(model, speculative=speculate(5))
    draft_with(engine, corrupted({"a": range(4, 90)}, 256))
    with caplog.at_level("INFO"):
        output = engine.submit(request("a", max_tokens=50)).result()
    assert list(output.ids) == list(range(4, 54))
    assert engine._runner.num_replays == 0
    reasons = [r.getMessage() for r in caplog.records if r.getMessage().startswith("windows of")]
    assert len(reasons) == 1


def test_borders_that_move_keep_their_memory() -> None:
    borders = torch.tensor([0, 2, 3, 6])
    ragged = Ragged.over(borders, [2, 1, 3])
    assert (ragged.num_rows, ragged.num_seqs, ragged.is_single_rows) == (6, 3, False)
    assert ragged.borders_S1.data_ptr() == borders.data_ptr()
    assert ragged.seq_of_T.tolist() == [0, 0, 1, 2, 2, 2]
    borders[1] = 1
    assert ragged.borders_S1.tolist() == [0, 1, 3, 6]
