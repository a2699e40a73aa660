"""A process killed with SIGKILL during write-back leaves nothing that could be taken for whole."""

import os
import subprocess
import sys
from pathlib import Path

from tests.engine.external.chains import assert_intact, chain, store
from tests.engine.external.killed import BASE, EVICTED, NEW, pool_at
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


def child(mode: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.external.killed", mode, str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_killed_before_any_change_of_a_file(tmp_path: Path) -> None:
    with child("points", tmp_path) as process:
        printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    num_killed = int(printed)
    # view, fsync and rename for two units, a state and a manifest, three directories, deletions
    assert num_killed >= 15
    outcomes, torn = [], 0
    for count in range(num_killed + 1):
        directory = tmp_path / str(count)
        torn += any(path.name.endswith(".tmp") for path in directory.rglob("*"))
        pool = pool_at(directory)
        pool.check()
        assert_intact(pool.load(BASE[-1]), BASE)
        found = pool.load(EVICTED[-1]), pool.load(NEW[-1])
        for keys, checkpoint in zip((EVICTED, NEW), found, strict=True):
            if checkpoint is not None:
                assert_intact(checkpoint, keys)
        outcomes.append(tuple(checkpoint is not None for checkpoint in found))
        assert pool.stats().num_corrupt == 0, "a torn state needed more than an absent manifest"
        # and the directory takes the checkpoint again
        store(pool, NEW)
        assert pool.flush(PATIENCE_S)
        assert_intact(pool.load(NEW[-1]), NEW)
        pool.check()
        pool.close()
    assert torn >= 4
    # first the old one goes, then nothing but the base is there, at last the new one
    assert sorted(set(outcomes), key=outcomes.index) == [
        (True, False),
        (False, False),
        (False, True),
    ]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    for round_ in range(3):
        with child("endless", tmp_path) as process:
            assert process.stdout.readline() == "open\n"
            durable = [process.stdout.readline().strip() for _ in range(2 + 3 * round_)]
            process.kill()
            durable += process.stdout.read().split()
        assert process.returncode == -9
        pool = pool_at(tmp_path / "endless", budget=6000)
        pool.check()
        # written and not evicted since: at most the two stores after it
        assert_intact(pool.load(chain(durable[-1])[-1]), chain(durable[-1]))
        intact = 0
        for number in range(int(durable[-1]) + 4):
            keys = chain(f"{number:05d}")
            checkpoint = pool.load(keys[-1])
            if checkpoint is not None:
                assert_intact(checkpoint, keys)
                intact += 1
        assert intact >= 1
        assert pool.stats().num_corrupt == 0
        pool.check()
        pool.close()
        left = {path.name for path in (tmp_path / "endless").iterdir()}
        assert left == {"LOCK", "pool.json", "units", "states", "manifests"}
        assert os.listdir(tmp_path) == ["endless"]
