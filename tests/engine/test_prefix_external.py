"""Prefixes that outlive the arenas: evicted, or kept over a restart."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moonlet.core.errors import ConfigError
from moonlet.engine import Engine, TokenOutput
from moonlet.engine.memory import ExternalOptions, MemoryOptions
from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_model
from tests.engine.test_engine_model import assert_same, prompt_of
from tests.engine.test_prefix_model import ask

PROMPT = prompt_of(2, 50)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model()


def engine_with(model: Transformer, external: ExternalOptions | None, **memory: object) -> Engine:
    options = MemoryOptions(page_size=12, unit_size=4, external=external, **memory)
    return Engine(model, max_num_seqs=2, max_model_len=120, memory=options, check_each_step=True)


@pytest.fixture(scope="module")
def cold(model: Transformer) -> TokenOutput:
    with engine_with(model, None, prefix_caching=False) as engine:
        return ask(engine, PROMPT)[0]


def test_a_restart_keeps_what_was_cached(model: Transformer, cold: TokenOutput, tmp_path: Path):
    kept = ExternalOptions(directory=tmp_path / "cache", disk_bytes=1 << 24)
    with engine_with(model, kept, fingerprint=b"one") as engine:
        first, cached = ask(engine, PROMPT)
        assert cached == 0
    with engine_with(model, kept, fingerprint=b"one") as engine:
        # the answer is part of the prefix as well
        again, cached = ask(engine, PROMPT)
        assert cached == 48
        longer, more = ask(engine, [*PROMPT, *first.ids, *prompt_of(7, 5)])
        assert more == 68
        engine.check()
    assert_same(first, cold)
    assert_same(again, cold)
    with engine_with(model, None, prefix_caching=False) as engine:
        assert_same(longer, ask(engine, [*PROMPT, *first.ids, *prompt_of(7, 5)])[0])


def test_another_model_is_refused(model: Transformer, tmp_path: Path):
    kept = ExternalOptions(directory=tmp_path / "cache", disk_bytes=1 << 24)
    engine_with(model, kept, fingerprint=b"one").close()
    with pytest.raises(ConfigError, match="fingerprint"):
        engine_with(model, kept, fingerprint=b"two")


@pytest.mark.parametrize("host_bytes", [0, 1 << 24])
def test_memory_holds_what_the_arenas_give_up(
    model: Transformer, cold: TokenOutput, host_bytes: int
):
    external = ExternalOptions(host_bytes=host_bytes) if host_bytes else None
    with engine_with(model, external, num_pages=10, num_checkpoints=1) as engine:
        ask(engine, PROMPT)
        for seed in range(20, 24):
            ask(engine, prompt_of(seed, 90))
        again, cached = ask(engine, PROMPT)
    assert cached == (48 if host_bytes else 0)
    assert_same(again, cold)


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_salts_are_kept_apart_on_disk(
    model: Transformer, tmp_path: Path, salt: str, request_of: Callable
):
    kept = ExternalOptions(directory=tmp_path / "cache", disk_bytes=1 << 24)
    with engine_with(model, kept) as engine:
        engine.submit(request_of("a", "tenant")).result()
    with engine_with(model, kept) as engine:
        handle = engine.submit(request_of("b", salt))
        handle.result()
        assert handle.num_cached_tokens == (48 if salt else 0)


@pytest.fixture
def request_of() -> Callable:
    from moonlet.engine import EngineRequest, SamplingParams

    def make(name: str, salt: str) -> EngineRequest:
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        return EngineRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, cache_salt=salt)

    return make


def test_sharing_must_be_on(tmp_path: Path):
    with pytest.raises(ConfigError, match="prefix_caching"):
        MemoryOptions(prefix_caching=False, external=ExternalOptions(directory=tmp_path))
