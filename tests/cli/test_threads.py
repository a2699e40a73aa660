"""Threads of the model are bounded and wait passively, which must be said before torch loads."""

import os
import subprocess
import sys

import pytest

from moonlet.core.env import bound_threads
from moonlet.core.errors import ConfigError
from tests.cli.checkpoints import environment
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    # set first, so that the test's end restores what was there
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_processors_of_the_process_bound_the_threads() -> None:
    assert bound_threads() == len(os.sched_getaffinity(0))
    assert os.environ["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_environment_beats_the_processors_and_a_flag_beats_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert bound_threads() == 3
    assert bound_threads(2) == 2
    assert os.environ["OMP_NUM_THREADS"] == "2"
    # an explicit wish of the user stands
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5"])
def test_a_malformed_bound_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        bound_threads()


@pytest.mark.parametrize("name", ["serve", "chat"])
def test_commands_bound_threads_before_torch_is_imported(name: str) -> None:
    script = (
        f"import sys, moonlet.cli.{name}, moonlet.core.env as env\n"
        "assert 'torch' not in sys.modules\n"
        f"module = sys.modules['moonlet.cli.{name}']\n"
        "def bound(threads):\n"
        "    assert 'torch' not in sys.modules\n"
        "    raise SystemExit(7)\n"
        "module.bound_threads = bound\n"
        f"module.model_directory = lambda model: None\n"
        f"module.{name}_command()\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment()
    )
    assert result.returncode == 7, result.stderr
