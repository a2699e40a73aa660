"""Decode steps from a tape: the same bits as call by call, and only where nothing else computes."""

import random
import threading

import pytest

from moonlet.core.errors import BackendError
from moonlet.engine import Engine, EngineRequest, SamplingParams, TokenOutput, replay
from moonlet.kernels import _native
from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_model
from moonlet.weights.checkpoint import load_for_inference
from tests.engine.running import MakeEngine
from tests.model import golden
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not _native.isa_levels(), reason="native kernels are not built")
NUM_IDS = 24


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_for_inference(golden.checkpoint_dir("tiny_k3")).model


def requests(model: Transformer, count: int, **params: object) -> list[EngineRequest]:
    generator = random.Random(count)
    vocabulary = model.config.vocab_size
    defaults = {"temperature": 0.0, "ignore_eos": True, "logprobs": 4}
    return [
        EngineRequest(
            request_id=f"r{i}",
            prompt_ids=[generator.randrange(vocabulary) for _ in range(3 + 5 * i)],
            sampling=SamplingParams(**{**defaults, **params}, max_tokens=NUM_IDS - 3 * i),
        )
        for i in range(count)
    ]


def run(engine: Engine, wanted: list[EngineRequest]) -> list[TokenOutput]:
    return [handle.result() for handle in [engine.submit(request) for request in wanted]]


class Together:
    """Engines and rounds whose requests all start in one step: the same batches every time."""

    def __init__(self, make_engine: MakeEngine, model: Transformer, **options: object) -> None:
        self._model, self._inside, self._may_go = model, threading.Event(), threading.Event()
        self.engine = make_engine(model, stop_ids=[], before_step=self._wait, **options)

    def _wait(self, rows: int) -> None:
        self._inside.set()
        assert self._may_go.wait(PATIENCE_S)

    def run(self, wanted: list[EngineRequest]) -> list[TokenOutput]:
        self._may_go.clear()
        self._inside.clear()
        sampling = SamplingParams(max_tokens=1)
        first = EngineRequest(request_id="first", prompt_ids=(1, 2), sampling=sampling)
        self.engine.submit(first)
        # while it waits inside its only step, the others queue up
        assert self._inside.wait(PATIENCE_S)
        handles = [self.engine.submit(request) for request in wanted]
        self._may_go.set()
        return [handle.result() for handle in handles]


# requests end at different steps, so batches of all sizes up to the count occur, and four rows a
# page make every sequence enter new pages
@pytest.mark.parametrize("count", [1, 3, 6])
def test_ids_and_log_probabilities_are_those_of_single_calls(
    make_engine: MakeEngine, model: Transformer, count: int
) -> None:
    wanted = requests(model, count)
    taped = Together(make_engine, model)
    # the second round meets recorded steps of every size, other slots and other pages
    rounds = [taped.run(wanted), taped.run(wanted)]
    assert taped.engine._runner.num_replays > NUM_IDS
    plain = Together(make_engine, model, replay_decode=False)
    expected = plain.run(wanted)
    assert plain.engine._runner.num_replays == 0
    for seen in rounds:
        assert [output.ids for output in seen] == [output.ids for output in expected]
        assert [output.logprobs for output in seen] == [output.logprobs for output in expected]


def test_sampled_ids_are_those_of_single_calls(make_engine: MakeEngine, model: Transformer) -> None:
    wanted = requests(model, 4, temperature=1.0, top_p=0.9, seed=7, repetition_penalty=1.1)
    seen = Together(make_engine, model).run(wanted)
    expected = Together(make_engine, model, replay_decode=False).run(wanted)
    assert [output.ids for output in seen] == [output.ids for output in expected]
    assert len({output.ids for output in seen}) == 4


def test_every_step_after_the_first_of_a_size_is_replayed(
    make_engine: MakeEngine, model: Transformer
) -> None:
    engine = make_engine(model, stop_ids=[])
    run(engine, requests(model, 1))
    # the prompt, then one recorded step
    assert engine.stats().num_forward_calls == NUM_IDS
    assert engine._runner.num_replays == NUM_IDS - 2


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_what_computes_in_torch_runs_call_by_call(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, kernels: str
) -> None:
    loaded = golden.checkpoint_dir("tiny_k3")
    plain = load_for_inference(loaded, kernels="reference").model
    model = plain if kernels == "reference" else tiny_model()
    together = Together(make_engine, model)
    with caplog.at_level("INFO"):
        outputs = together.run(requests(model, 2))
    assert [len(output.ids) for output in outputs] == [NUM_IDS, NUM_IDS - 3]
    assert together.engine._runner.num_replays == 0
    reasons = [r.getMessage() for r in caplog.records if "call by call" in r.getMessage()]
    # said once per batch size
    assert len(reasons) == len(set(reasons)) == 2
    assert all("torch computes" in reason for reason in reasons)


def test_a_step_too_large_to_keep_runs_call_by_call(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: Transformer,
) -> None:
    monkeypatch.setattr(replay, "MAX_BYTES", 1000)
    engine = make_engine(model, stop_ids=[])
    with caplog.at_level("INFO"):
        run(engine, requests(model, 1))
    assert engine._runner.num_replays == 0
    assert "a tape would keep" in caplog.text


def test_the_step_used_longest_ago_makes_room(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, model: Transformer
) -> None:
    together = Together(make_engine, model)
    engine = together.engine
    together.run(requests(model, 4))
    steps = engine._runner._replay._steps
    sizes = [step.num_bytes for step in steps.values()]
    assert [shape.num_seqs for shape in steps] == [4, 3, 2, 1]
    # room for all but one byte: the next recording drops the oldest
    monkeypatch.setattr(replay, "MAX_BYTES", sum(sizes) - 1)
    del steps[next(shape for shape in steps if shape.num_seqs == 1)]
    run(engine, requests(model, 1))
    assert [shape.num_seqs for shape in steps] == [3, 2, 1]


def test_a_failing_replay_ends_its_requests_and_no_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, model: Transformer
) -> None:
    engine = make_engine(model, stop_ids=[])
    (expected,) = run(engine, requests(model, 1))
    with monkeypatch.context() as broken:

        def fail(self: object) -> None:
            raise BackendError("call 3 of a tape failed with status 1")

        broken.setattr("moonlet.kernels.tape.Tape.replay", fail)
        (output,) = run(engine, requests(model, 1))
        assert output.finish == "error"
    assert run(engine, requests(model, 1))[0].ids == expected.ids
