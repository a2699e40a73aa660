"""Hand-over between engines: exact position, exact bits, refused when it does not fit."""

import io
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moonlet.core.errors import CheckpointError
from moonlet.engine import Engine, TokenOutput
from moonlet.engine.cache.chain import MediaSpan
from moonlet.engine.memory import MemoryOptions
from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_model
from tests.engine.test_engine_model import assert_same, prompt_of, request


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model()


def engine_of(model: Transformer, page_size: int = 12, fingerprint: bytes = b"one") -> Engine:
    memory = MemoryOptions(page_size=page_size, unit_size=4, fingerprint=fingerprint)
    return Engine(model, max_num_seqs=2, max_model_len=120, memory=memory, check_each_step=True)


@pytest.fixture
def sender(model: Transformer) -> Iterator[Engine]:
    with engine_of(model) as engine:
        yield engine


def exported(engine: Engine, prompt: list[int], salt: str = "") -> bytes:
    sent, copy = engine.sessions.request("export", prompt, salt)
    if sent is not None:
        engine.submit(sent).result()
    stream = io.BytesIO()
    copy.write(stream)
    return stream.getvalue()


def go_on(engine: Engine, prompt: list[int], name: str = "on") -> tuple[TokenOutput, int]:
    handle = engine.submit(request(name, prompt, max_tokens=6, logprobs=3))
    return handle.result(), handle.num_cached_tokens or 0


@pytest.mark.parametrize("length", [2, 5, 24, 25, 50])
def test_both_sides_continue_bit_for_bit(model: Transformer, sender: Engine, length: int):
    prompt = prompt_of(length, length)
    data = exported(sender, prompt)
    with engine_of(model, page_size=8) as receiver, engine_of(model) as twin:
        outputs = []
        for engine in (receiver, twin):
            engine.sessions.park(io.BytesIO(data), "")
            output, cached = go_on(engine, prompt)
            assert cached == length - 1
            outputs.append(output)
            engine.check()
    # ids and log probabilities, to the last bit
    assert outputs[0] == outputs[1]
    memory = MemoryOptions(prefix_caching=False)
    with Engine(model, max_num_seqs=1, max_model_len=120, memory=memory) as cold:
        assert_same(outputs[0], go_on(cold, prompt)[0])


def test_a_single_token_needs_no_payload(model: Transformer, sender: Engine):
    data = exported(sender, [7])
    with engine_of(model) as receiver:
        assert receiver.sessions.park(io.BytesIO(data), "").position == 0
        assert go_on(receiver, [7])[1] == 0


def test_what_does_not_fit_is_refused(model: Transformer, sender: Engine):
    data = exported(sender, prompt_of(3, 30))
    with engine_of(model, fingerprint=b"two") as stranger:
        with pytest.raises(CheckpointError, match="fingerprint"):
            stranger.sessions.park(io.BytesIO(data), "")
        assert len(stranger.sessions.parked) == 0
    with engine_of(model) as receiver:
        for damaged in (data[:-1], data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]):
            with pytest.raises(CheckpointError):
                receiver.sessions.park(io.BytesIO(damaged), "")
        assert go_on(receiver, prompt_of(3, 30))[1] == 0


def test_only_its_own_tenant_and_tokens_meet_a_session(model: Transformer, sender: Engine):
    prompt = prompt_of(4, 30)
    data = exported(sender, prompt)
    with engine_of(model) as receiver:
        receiver.sessions.park(io.BytesIO(data), "tenant")
        assert go_on(receiver, prompt, "a")[1] == 0
    with engine_of(model) as receiver:
        receiver.sessions.park(io.BytesIO(data), "")
        other = [*prompt[:28], (prompt[28] + 1) % 256, prompt[29]]
        assert go_on(receiver, other, "b")[1] == 0
        assert go_on(receiver, prompt[:-1], "c")[1] < 29
        assert go_on(receiver, [*prompt, 5, 6], "d")[1] == 29


@pytest.mark.parametrize("start", [0, 28])
def test_a_request_with_an_image_does_not_continue_a_session_of_text(
    model: Transformer, sender: Engine, start: int
):
    # placeholders of an image are equal ids; the session's rows were computed without it
    prompt = prompt_of(4, 30)
    data = exported(sender, prompt)
    with engine_of(model) as receiver:
        receiver.sessions.park(io.BytesIO(data), "")
        shown = replace(
            request("shown", prompt, max_tokens=1), media=(MediaSpan(start, start + 2, b"x"),)
        )
        handle = receiver.submit(shown)
        handle.result()
        assert handle.num_cached_tokens < 29


def test_a_lease_ends(sender: Engine):
    data = exported(sender, prompt_of(4, 30))
    parked = sender.sessions.parked
    now = [0.0]
    parked._clock = lambda: now[0]
    sender.sessions.park(io.BytesIO(data), "")
    assert len(parked) == 1
    now[0] = 301.0
    assert len(parked) == 0
