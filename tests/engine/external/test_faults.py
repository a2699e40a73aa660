"""A directory that is torn, changed, foreign, full or in use never gives a wrong byte."""

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moonlet.core.errors import ConfigError
from moonlet.engine.cache.external import ExternalPool
from moonlet.engine.cache.external import folder as folder_module
from moonlet.engine.cache.external.checkpoint import digest
from moonlet.engine.cache.external.folder import PoolFolder
from tests.engine.external.chains import GEOMETRY, IDENTITY, assert_intact, chain, store
from tests.patience import PATIENCE_S

Open = Callable[..., ExternalPool]
BASE, LONG, OTHER = chain("ab"), chain("abcd"), chain("xy")


@pytest.fixture
def written(open_pool: Open, tmp_path: Path) -> Path:
    """A directory with three checkpoints, two of one chain."""
    pool = open_pool()
    for keys in (BASE, LONG, OTHER):
        store(pool, keys)
        assert pool.flush(PATIENCE_S)
    pool.close()
    return tmp_path / "pool"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


FAULTS = {"flipped": flip, "cut": cut, "long": lengthen, "missing": Path.unlink}
# object, and which of BASE, LONG and OTHER survive its loss
OBJECTS = {
    "shared unit": ("units", BASE[0], [OTHER]),
    "last unit": ("units", LONG[3], [BASE, OTHER]),
    "state": ("states", BASE[-1], [LONG, OTHER]),
}


@pytest.mark.parametrize("when", ["before the start", "while open"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", OBJECTS)
def test_a_broken_object_is_never_returned(
    open_pool: Open, written: Path, target: str, fault: str, when: str
) -> None:
    kind, key, survivors = OBJECTS[target]
    if when == "while open":
        pool = open_pool(host_bytes=0)
        FAULTS[fault](written / kind / key.hex())
    else:
        FAULTS[fault](written / kind / key.hex())
        pool = open_pool(host_bytes=0)
    loaded = {keys: pool.load(keys[-1]) for keys in (BASE, LONG, OTHER)}
    for keys, checkpoint in loaded.items():
        if keys in survivors:
            assert_intact(checkpoint, keys)
        else:
            assert checkpoint is None
            assert pool.longest(keys) == (1 if keys == LONG and BASE in survivors else None)
    assert pool.stats().num_corrupt == 3 - len(survivors)
    # books and files agree again, and the lost one can be stored anew
    pool.check()
    for keys in (BASE, LONG):
        store(pool, keys)
    assert pool.flush(PATIENCE_S)
    for keys in (BASE, LONG, OTHER):
        assert_intact(pool.load(keys[-1]), keys)


@pytest.mark.parametrize("fault", ["flipped", "cut", "missing", "empty", "not JSON"])
def test_a_broken_manifest_is_dropped_with_its_objects(
    open_pool: Open, written: Path, fault: str
) -> None:
    manifest = written / "manifests" / OTHER[-1].hex()
    if fault in FAULTS:
        FAULTS[fault](manifest)
    else:
        manifest.write_bytes(b"" if fault == "empty" else b"\xff{")
    pool = open_pool()
    pool.check()
    assert pool.longest(OTHER) is None
    assert pool.stats().num_corrupt == (fault != "missing")
    assert not (written / "states" / OTHER[-1].hex()).exists()
    assert not (written / "units" / OTHER[0].hex()).exists()
    assert_intact(pool.load(LONG[-1]), LONG)


def test_any_flipped_byte_of_a_manifest_is_noticed(open_pool: Open, written: Path) -> None:
    manifest = written / "manifests" / OTHER[-1].hex()
    whole = manifest.read_bytes()
    for at in range(0, len(whole), 7):
        flip(manifest, at)
        pool = open_pool(host_bytes=0)
        checkpoint = pool.load(OTHER[-1])
        # what is left may only be the whole truth: white space means nothing
        assert checkpoint is None, f"byte {at}"
        store(pool, OTHER)
        pool.close()
        assert manifest.read_bytes() == whole


def rewritten(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change a manifest and give it the sha256 of what it says now."""
    body = json.loads(path.read_bytes())["body"]
    change(body)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(json.dumps({"body": body, "sha256": digest(canonical)}).encode())


CONTRADICTIONS: dict[str, Callable[[dict], object]] = {
    "position": lambda body: body.update(position=12),
    "unit length": lambda body: body["units"][0].update(bytes=1),
    "state length": lambda body: body["state"].update(bytes=1),
    "no state": lambda body: body.pop("state"),
    "no units": lambda body: body.update(units=[], position=0),
    "unit twice": lambda body: body["units"].__setitem__(0, body["units"][1]),
    "short key": lambda body: body["units"][0].update(key="ab"),
    "no hex": lambda body: body["units"][0].update(key="zz"),
    "units a number": lambda body: body.update(units=3),
    "name of another": lambda body: body["units"].reverse(),
    "unknown unit": lambda body: body["units"][0].update(key="00" * 32),
    "other digest of a shared unit": lambda body: body["units"][0].update(sha256="0" * 64),
}


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_dropped(
    open_pool: Open, written: Path, contradiction: str
) -> None:
    manifest = written / "manifests" / LONG[-1].hex()
    rewritten(manifest, CONTRADICTIONS[contradiction])
    os.utime(written / "manifests" / BASE[-1].hex(), ns=(0, 0))
    pool = open_pool()
    pool.check()
    assert pool.load(LONG[-1]) is None
    assert pool.stats().num_corrupt == 1
    assert_intact(pool.load(BASE[-1]), BASE)


FOREIGN = {
    "format is 0, here it is 1": lambda body: body.update(format=0),
    "fingerprint is 'model-b', here it is 'model-a'": lambda body: body.update(
        fingerprint="model-b"
    ),
    "geometry.head_dim is 64, here it is 2": lambda body: body["geometry"].update(head_dim=64),
    "geometry.dtype is 'float32', here it is 'bfloat16'": lambda body: body["geometry"].update(
        dtype="float32"
    ),
    "hash_unit is 8, here it is 4": lambda body: body.update(hash_unit=8),
    "geometry is None, not a table": lambda body: body.pop("geometry"),
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_a_foreign_manifest_is_listed_with_its_reason(
    open_pool: Open, written: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    rewritten(written / "manifests" / OTHER[-1].hex(), FOREIGN[reason])
    pool = open_pool()
    assert dict(pool.refused) == {OTHER[-1].hex(): reason}
    assert pool.stats().num_refused == 1
    assert pool.stats().num_corrupt == 0
    assert pool.longest(OTHER) is None
    assert_intact(pool.load(LONG[-1]), LONG)
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("identity", "field"),
    [
        (replace(IDENTITY, fingerprint="model-b"), "fingerprint is 'model-a', here it is 'model-b"),
        (replace(IDENTITY, hash_unit=8), "hash_unit is 4, here it is 8"),
        (replace(IDENTITY, geometry=replace(GEOMETRY, num_heads=4)), "geometry.num_heads is 2"),
        (
            replace(IDENTITY, geometry=replace(GEOMETRY, state_dtype="bfloat16")),
            "geometry.state_dtype is 'float32'",
        ),
    ],
)
def test_the_directory_of_another_model_is_refused_and_kept(
    open_pool: Open, written: Path, identity: object, field: str
) -> None:
    before = {p: p.read_bytes() for p in written.rglob("*") if p.is_file() and p.name != "LOCK"}
    with pytest.raises(ConfigError) as refusal:
        open_pool(identity=identity)
    # sizes that follow from another field may differ first
    assert field in str(refusal.value) or "_bytes is" in str(refusal.value)
    assert "another model or version" in str(refusal.value)
    assert {p: p.read_bytes() for p in before} == before
    pool = open_pool()
    assert_intact(pool.load(LONG[-1]), LONG)


def test_a_directory_of_an_older_version_is_refused(open_pool: Open, written: Path) -> None:
    marker = json.loads((written / "pool.json").read_text())
    (written / "pool.json").write_text(json.dumps(marker | {"format": 0}))
    with pytest.raises(ConfigError, match="format is 0, here it is 1"):
        open_pool()
    (written / "pool.json").write_text("{")
    with pytest.raises(ConfigError, match=r"pool\.json is damaged"):
        open_pool()


def test_a_directory_that_is_no_pool_is_left_alone(open_pool: Open, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"meow")
    with pytest.raises(ConfigError, match=r"holds 'cat\.png' and is no cache"):
        open_pool(directory=tmp_path / "photos")
    assert os.listdir(tmp_path / "photos") == ["cat.png"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_pool(directory=tmp_path / "file")


def test_a_second_process_is_refused(open_pool: Open, written: Path) -> None:
    script = (
        "import fcntl, os, sys\n"
        "handle = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.flock(handle, fcntl.LOCK_EX)\n"
        "os.ftruncate(handle, 0)\n"
        "os.pwrite(handle, str(os.getpid()).encode(), 0)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(written / "LOCK")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"in use by process {other.pid}"):
            open_pool()
        other.kill()
    assert_intact(open_pool().load(LONG[-1]), LONG)


@pytest.mark.parametrize("failing", ["units", "states", "manifests", "rename"])
def test_a_full_disk_ends_writing_and_nothing_else(
    open_pool: Open,
    written: Path,
    failing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = open_pool(host_bytes=0)
    original, full = folder_module.write_durably, OSError(errno.ENOSPC, "No space left on device")

    def write(path: Path, data: object) -> None:
        if failing == "rename":
            monkeypatch.setattr(os, "replace", refuse)
        elif path.parent.name == failing:
            raise full
        original(path, data)

    def refuse(source: Path, target: Path) -> None:
        raise full

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(folder_module, "write_durably", write)
        store(pool, chain("abq"))
        assert pool.flush(PATIENCE_S)
        store(pool, chain("abr"))
        assert pool.flush(PATIENCE_S)
    pool.check()
    assert [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()] == [
        f"nothing more is written to the cache {written}: No space left on device; "
        "what is there stays in use"
    ]
    stats = pool.stats()
    assert not stats.is_writing
    assert stats.num_lost_writes == 1
    assert pool.longest(chain("abq")) == 1
    for keys in (BASE, LONG, OTHER):
        assert_intact(pool.load(keys[-1]), keys)
    # memory goes on alone
    pool.close()
    monkeypatch.undo()
    pool = open_pool()
    assert pool.stats().is_writing
    store(pool, chain("abq"))
    assert pool.flush(PATIENCE_S)
    assert chain("abq")[-1] in pool._disk


def test_memory_serves_on_when_the_disk_is_full(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool()

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for text in ("ab", "abc", "x"):
        store(pool, chain(text))
        assert pool.flush(PATIENCE_S)
        assert_intact(pool.load(chain(text)[-1]), chain(text))
    pool.check()
    assert (pool.stats().num_host_hits, pool.stats().num_lost_writes) == (3, 1)
    assert pool.stats().disk_bytes == 0


def test_a_unit_found_broken_while_its_user_is_written(
    open_pool: Open, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer relies on a unit that a reader drops before the manifest is there."""
    pool = open_pool(host_bytes=0)
    entered, gate, original = threading.Event(), threading.Event(), PoolFolder.write

    def write(self: PoolFolder, kind: str, key: bytes, data: object) -> None:
        if kind == "manifests":
            entered.set()
            assert gate.wait(PATIENCE_S)
        original(self, kind, key, data)

    monkeypatch.setattr(PoolFolder, "write", write)
    flip(written / "units" / BASE[0].hex())
    store(pool, chain("abq"))
    assert entered.wait(PATIENCE_S)
    assert pool.load(BASE[-1]) is None
    gate.set()
    assert pool.flush(PATIENCE_S)
    pool.check()
    assert pool.longest(chain("abq")) is None
    assert pool.stats().num_lost_writes == 1
    store(pool, chain("abq"))
    assert pool.flush(PATIENCE_S)
    assert_intact(pool.load(chain("abq")[-1]), chain("abq"))


def test_a_unit_that_vanished_before_its_turn_costs_one_write(
    open_pool: Open, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored without a unit that the disk had, which is gone when the write begins."""
    pool = open_pool(host_bytes=0)
    entered, gate = threading.Event(), threading.Event()
    original = pool._queue._write

    def slow(checkpoint: object) -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)
        original(checkpoint)

    monkeypatch.setattr(pool._queue, "_write", slow)
    source = store(pool, chain("abq"))
    assert source.units_read == [2]
    assert entered.wait(PATIENCE_S)
    (written / "units" / BASE[1].hex()).unlink()
    assert pool.load(LONG[-1]) is None
    gate.set()
    assert pool.flush(PATIENCE_S)
    pool.check()
    assert pool.longest(chain("abq")) is None
    assert pool.stats().num_lost_writes == 1
    assert pool.stats().is_writing


def test_evicted_while_being_read_is_a_miss_and_not_damage(
    open_pool: Open, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool(host_bytes=0)
    original = PoolFolder.read

    def read(self: PoolFolder, kind: str, key: bytes, num_bytes: int) -> object:
        monkeypatch.setattr(PoolFolder, "read", original)
        with pool._disk._lock:
            freed = pool._disk._ledger.remove(OTHER[-1])
            pool._disk._forget(freed)
            pool._disk._delete(freed)
        return original(self, kind, key, num_bytes)

    monkeypatch.setattr(PoolFolder, "read", read)
    assert pool.load(OTHER[-1]) is None
    assert pool.stats().num_corrupt == 0
    pool.check()
