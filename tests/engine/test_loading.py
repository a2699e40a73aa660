"""Prefixes that come from a slow disk: others go on, and giving up at any stage frees everything.

The disk answers object by object, when the test says so, so nothing here depends on time.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonlet.engine import Engine, EngineRequest, SamplingParams
from moonlet.engine.cache.external.folder import PoolFolder
from moonlet.engine.memory import ExternalOptions, MemoryOptions
from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_model
from tests.engine.test_engine_model import assert_same, prompt_of, request
from tests.patience import PATIENCE_S

PROMPT = prompt_of(2, 50)
NUM_OBJECTS = 13


class SlowDisk:
    """Every read of an object waits for a permit; `reads` counts those that have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)
        self.is_open = False
        read = PoolFolder.read

        def slow(folder: PoolFolder, kind: str, key: bytes, num_bytes: int) -> object:
            self._begun.release()
            if not self.is_open:
                assert self._permits.acquire(timeout=PATIENCE_S)
            return read(folder, kind, key, num_bytes)

        monkeypatch.setattr(PoolFolder, "read", slow)

    def let(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()

    def open(self) -> None:
        self.is_open = True
        self.let(1000)

    def wait_for_read(self) -> None:
        assert self._begun.acquire(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model()


def options(directory: Path, **memory: object) -> MemoryOptions:
    external = ExternalOptions(directory=directory, disk_bytes=1 << 24)
    return MemoryOptions(page_size=12, unit_size=4, external=external, **memory)


@pytest.fixture(scope="module")
def filled(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the prompt's checkpoint at 48 and nothing beyond."""
    path = tmp_path_factory.mktemp("cache") / "cache"
    with Engine(model, max_num_seqs=2, max_model_len=120, memory=options(path)) as engine:
        engine.submit(request("first", PROMPT, max_tokens=1)).result()
    return path


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk(monkeypatch)
    yield slow
    slow.open()


@pytest.fixture
def make(
    model: Transformer, filled: Path, tmp_path: Path, disk: SlowDisk
) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(max_num_seqs: int = 4, **memory: object) -> Engine:
        copy = tmp_path / "cache"
        shutil.copytree(filled, copy)
        engine = Engine(
            model,
            max_num_seqs=max_num_seqs,
            max_model_len=120,
            memory=options(copy, **memory),
            check_each_step=True,
        )
        engines.append(engine)
        return engine

    yield build
    disk.open()
    for engine in engines:
        engine.close()
        engine.check()
        stats = engine.stats()
        assert stats.num_free_slots == stats.num_slots
        assert stats.num_free_pages == stats.num_pages
        assert stats.num_loading == stats.num_running == stats.num_waiting == 0
        assert engine._writeback is not None
        assert engine._writeback.loads.held_bytes == 0


def cold(model: Transformer, prompt: list[int], **params: object) -> object:
    memory = MemoryOptions(prefix_caching=False)
    with Engine(model, max_num_seqs=1, max_model_len=120, memory=memory) as engine:
        return engine.submit(request("cold", prompt, **params)).result()


def test_streams_go_on_while_a_prefix_is_read(make, disk: SlowDisk, model: Transformer):
    engine = make()
    waiting = engine.submit(request("waits", PROMPT, max_tokens=3))
    disk.wait_for_read()
    # the whole life of another request fits between two objects of the disk
    other = engine.submit(request("other", prompt_of(9, 30), max_tokens=20)).result()
    stats = engine.stats()
    assert len(other.ids) == 20
    assert (stats.num_loading, stats.num_running, stats.num_waiting) == (1, 0, 0)
    assert waiting.num_cached_tokens is None
    disk.open()
    output = waiting.result()
    assert waiting.num_cached_tokens == 48
    assert_same(output, cold(model, PROMPT, max_tokens=3))
    stats = engine.stats()
    assert (stats.num_loads, stats.num_failed_loads, stats.num_cancelled_loads) == (1, 0, 0)
    assert stats.num_loaded_bytes > 0
    assert stats.load_wait_s > 0


@pytest.mark.parametrize("num_read", [0, 1, NUM_OBJECTS - 1, NUM_OBJECTS])
def test_giving_up_frees_everything_at_every_stage(make, disk: SlowDisk, num_read: int):
    engine = make()
    handle = engine.submit(request("gone", PROMPT, max_tokens=60))
    disk.let(num_read)
    for _ in range(min(num_read + 1, NUM_OBJECTS)):
        disk.wait_for_read()
    handle.abort()
    assert handle.result().finish == "abort"
    stats = engine.stats()
    assert stats.num_free_slots == stats.num_slots
    assert stats.num_free_pages == stats.num_pages
    # somebody else runs while the thread still hangs in the object that nobody wants
    assert engine.submit(request("next", prompt_of(4, 9), max_tokens=2)).result().finish == "length"
    disk.open()
    assert engine.submit(request("again", PROMPT, max_tokens=2)).result().finish == "length"


def test_a_deadline_ends_a_request_that_waits_for_the_disk(make, disk: SlowDisk):
    engine = make()
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    late = EngineRequest(request_id="late", prompt_ids=PROMPT, sampling=sampling, deadline_s=0.05)
    output = engine.submit(late).result()
    assert output.finish == "error"
    assert "deadline" in (output.error or "")
    assert engine.stats().num_loading == 0


@pytest.mark.parametrize("fault", ["torn", "vanished"])
@pytest.mark.parametrize("kind", ["states", "units"])
def test_what_cannot_be_read_is_computed(
    make, disk: SlowDisk, model: Transformer, tmp_path: Path, fault: str, kind: str
):
    engine = make()
    for path in (tmp_path / "cache" / kind).iterdir():
        if fault == "torn":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()
    disk.open()
    handle = engine.submit(request("computed", PROMPT, max_tokens=3))
    assert_same(handle.result(), cold(model, PROMPT, max_tokens=3))
    assert handle.num_cached_tokens == 0
    assert engine.stats().num_failed_loads >= 1


def test_two_who_want_one_prefix_read_it_once(make, disk: SlowDisk, model: Transformer):
    engine = make()
    handles = [engine.submit(request(name, PROMPT, max_tokens=3)) for name in "ab"]
    disk.wait_for_read()
    disk.open()
    for handle in handles:
        assert_same(handle.result(), cold(model, PROMPT, max_tokens=3))
        assert handle.num_cached_tokens == 48
    assert engine.stats().num_loads == 1


def test_an_engine_that_closes_does_not_wait_for_all_objects(make, disk: SlowDisk):
    engine = make()
    handle = engine.submit(request("cut", PROMPT))
    disk.wait_for_read()
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert handle.result().finish == "abort"
    disk.let(1)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_decoding_stream_takes_the_pages_of_a_load(make, disk: SlowDisk, model: Transformer):
    # 11 pages: 5 for the load and 6 for a stream that ends up with 10
    engine = make(num_pages=11)
    stream = engine.submit(request("grows", prompt_of(5, 8), max_tokens=110))
    next(iter(stream.__iter__()))
    waiting = engine.submit(request("waits", PROMPT, max_tokens=3))
    disk.wait_for_read()
    assert stream.result().finish in ("length", "abort")
    disk.open()
    assert_same(waiting.result(), cold(model, PROMPT, max_tokens=3))


def test_loads_leave_places_for_those_who_need_none(make, disk: SlowDisk):
    engine = make(max_num_seqs=2)
    engine.submit(request("a", PROMPT, max_tokens=3))
    disk.wait_for_read()
    longer = [*PROMPT, *prompt_of(6, 20)]
    engine.submit(request("b", longer, max_tokens=3))
    others = [engine.submit(request(f"o{n}", prompt_of(n, 20), max_tokens=4)) for n in (11, 12)]
    for other in others:
        assert other.result().finish == "length"
    disk.open()


def test_a_load_that_ends_between_two_looks_stalls_nobody(
    model: Transformer, filled: Path, tmp_path: Path, disk: SlowDisk
):
    copy = tmp_path / "cache"
    shutil.copytree(filled, copy)
    # one load at a time, and one that nobody wants any more fills the memory
    external = ExternalOptions(directory=copy, disk_bytes=1 << 24, max_load_bytes=1)
    memory = MemoryOptions(page_size=12, unit_size=4, external=external)
    with Engine(model, max_num_seqs=4, max_model_len=120, memory=memory) as engine:
        gone = engine.submit(request("gone", PROMPT, max_tokens=3))
        disk.wait_for_read()
        gone.abort()
        gone.result()
        schedule, loads = engine._scheduler.schedule, engine._writeback.loads
        is_free = threading.Event()

        def late() -> object:
            step = schedule()
            if step is None and not disk.is_open:
                # the reader lets go after the scheduler has looked and before the engine does
                disk.open()
                assert is_free.wait(PATIENCE_S)
            return step

        wake, engine._scheduler.schedule = engine._writeback.on_loaded, late

        def freed() -> None:
            if not loads.held_bytes:
                is_free.set()
            wake()

        engine._writeback.on_loaded = freed
        handle = engine.submit(request("next", PROMPT, max_tokens=3))
        assert_same(handle.result(), cold(model, PROMPT, max_tokens=3))
        assert handle.num_cached_tokens == 48
