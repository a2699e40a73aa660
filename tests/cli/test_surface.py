"""The command line as a stored list: no flag appears, vanishes or changes unseen.

``python -m tests.cli.surface --write`` rewrites the list.
"""

import subprocess
import sys

import pytest

from moonlet.cli.main import run
from tests.cli.checkpoints import environment, moonlet
from tests.cli.surface import STORED, command_names, leaf_names, surface
from tests.patience import PATIENCE_S


def test_the_flags_are_the_stored_ones() -> None:
    assert surface() == STORED.read_text(encoding="utf-8")


def test_help_and_import_load_nothing_heavy() -> None:
    heavy = ("torch", "fastapi", "starlette", "uvicorn", "tiktoken", "numpy", "pydantic", "httpx2")
    script = (
        "import sys, moonlet\n"
        "before = set(sys.modules)\n"
        "from moonlet.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        f"assert not set({heavy!r}) & set(sys.modules), set({heavy!r}) & set(sys.modules)\n"
        "assert not any(m.startswith(('rich', 'cyclopts')) for m in before), before\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(),
    )
    assert result.returncode == 0, result.stderr
    for name in command_names():
        assert name in result.stdout


@pytest.mark.parametrize("name", leaf_names())
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Example: " in shown
    assert f"moonlet {name}" in shown.split("Example: ")[1]


def test_unknown_commands_name_the_closest_one() -> None:
    result = moonlet("serv")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "serve" in result.stderr


def test_debug_shows_the_traceback_of_a_known_failure() -> None:
    plain = moonlet("serve", "no/such/model")
    assert plain.returncode == 2
    assert plain.stderr.startswith("moonlet: no/such/model")
    assert len(plain.stderr.splitlines()) == 1
    debug = moonlet("serve", "no/such/model", env={"MOONLET_DEBUG": "1"})
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr
    malformed = moonlet("serve", "no/such/model", env={"MOONLET_DEBUG": "perhaps"})
    assert malformed.returncode == 2
    assert "MOONLET_DEBUG" in malformed.stderr


def test_version() -> None:
    import moonlet as package

    assert moonlet("--version").stdout.strip() == package.__version__
