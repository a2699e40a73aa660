"""Run by `test_kill.py` as a process: stores checkpoints and is killed on the way.

``points DIRECTORY``: for k = 0, 1, ... a fork opens a copy of a prepared pool and stores a
checkpoint that shares units with one there and evicts another; just before its k-th change of a
file it kills itself with SIGKILL, halving what it was about to write where it is a write. Ends
with the first fork that lives, and prints how many were killed.

``endless DIRECTORY``: stores checkpoints until killed from outside; prints a line for each that is
durable.
"""

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from moonlet.engine.cache.external import ExternalPool
from moonlet.engine.cache.external import folder as folder_module
from tests.engine.external.chains import IDENTITY, STATE_BYTES, UNIT_BYTES, chain, store

BASE, EVICTED, NEW = chain("ab"), chain("xy"), chain("abcd")
# BASE and NEW fit with their manifests, EVICTED does not fit beside them
BUDGET = 4 * UNIT_BYTES + 2 * STATE_BYTES + 2600


def pool_at(directory: Path, budget: int = BUDGET) -> ExternalPool:
    return ExternalPool(IDENTITY, host_bytes=0, directory=directory, disk_bytes=budget)


class Trap:
    """Kills the process at its n-th step."""

    def __init__(self, steps_left: int) -> None:
        self.steps_left = steps_left

    def __call__(self, act: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            self.step()
            return act(*args, **kwargs)

        return wrapped

    def step(self) -> None:
        if not self.steps_left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps_left -= 1

    def halve(self, view: Callable[[object], memoryview]) -> Callable[[object], memoryview]:
        def wrapped(data: object) -> memoryview:
            whole = view(data)
            if not self.steps_left:
                return whole[: len(whole) // 2]
            self.steps_left -= 1
            return whole

        return wrapped


def store_and_die(directory: Path, steps_left: int) -> None:
    pool, trap = pool_at(directory), Trap(steps_left)
    folder_module.view = trap.halve(folder_module.view)
    os.fsync, os.replace, os.unlink = trap(os.fsync), trap(os.replace), trap(os.unlink)
    store(pool, NEW)
    pool.flush()
    os._exit(0)


def points(directory: Path) -> None:
    prepared = directory / "prepared"
    pool = pool_at(prepared)
    for keys in (EVICTED, BASE):
        store(pool, keys)
        pool.flush()
    pool.close()
    for count in itertools.count():
        victim = directory / str(count)
        shutil.copytree(prepared, victim)
        child = os.fork()
        if not child:
            store_and_die(victim, count)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            say(str(count))
            return
        assert status == -signal.SIGKILL, status


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def endless(directory: Path) -> None:
    pool = pool_at(directory / "endless", budget=6000)
    say("open")
    for number in itertools.count():
        text = f"{number:05d}"
        store(pool, chain(text))
        if number % 3 == 0:
            pool.flush()
            say(text)


if __name__ == "__main__":
    {"points": points, "endless": endless}[sys.argv[1]](Path(sys.argv[2]))
