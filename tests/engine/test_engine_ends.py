"""Requests that the engine refuses, and how it closes."""

import threading

import pytest

from moonlet.core.errors import ConfigError, PromptTooLong, RequestError
from moonlet.engine import Engine, TokenOutput
from moonlet.testing import ScriptedModel, count_up
from tests.engine.running import Gate, MakeEngine, request
from tests.patience import PATIENCE_S


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
    closer.join(PATIENCE_S)
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
