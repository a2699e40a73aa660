"""The harness itself: poisoned memory, strictness about golden vectors, the closing line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import golden_data

ROOT = Path(__file__).parents[1]

GOLDEN_TESTS = """
from tests.golden_data import count_vectors, golden_dir, require

def test_present():
    assert require(golden_dir("model") / "a.json").read_text() == "1"
    count_vectors(2)

def test_absent():
    require(golden_dir("model") / "b.json")

def test_skipped():
    import pytest
    pytest.skip("no reason")
"""


def run_pytest(
    folder: Path, golden: Path | None, *options: str, ci: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the sample tests in a process of their own, under this harness."""
    (folder / "test_sample.py").write_text(GOLDEN_TESTS)
    (folder / "model").mkdir()
    (folder / "model" / "a.json").write_text("1")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MOONLET_"))}
    environment |= {"PYTHONPATH": str(ROOT), "CI": ci}
    if golden is not None:
        environment["MOONLET_GOLDEN"] = str(golden)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), str(folder / "test_sample.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_named_set_makes_absent_and_skipped_golden_tests_fail(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run_pytest(tmp_path, tmp_path, *options)
    assert "2 failed, 1 passed" in done.stdout
    assert "golden data absent" in done.stdout
    assert "a golden test may not be skipped here" in done.stdout
    assert done.stdout.splitlines()[-1] == "golden: full, 2 vectors"


def test_ci_is_as_strict_without_a_named_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_pytest(tmp_path, None, "-k", "skipped or absent", ci="true")
    assert "2 failed" in done.stdout


def test_elsewhere_they_are_skipped_with_a_reason(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, None, "-k", "skipped or absent")
    assert "2 skipped" in done.stdout
    assert "golden data absent" in done.stdout
    assert done.returncode == 0


def test_the_subset_is_the_last_place_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONLET_GOLDEN", "/somewhere")
    assert golden_data.golden_dir("chat") == Path("/somewhere/chat")
    assert golden_data.is_full()
    monkeypatch.delenv("MOONLET_GOLDEN")
    monkeypatch.setattr(golden_data, "_SIBLING", Path("/nowhere"))
    assert golden_data.golden_dir("chat") == ROOT / "tests" / "golden" / "chat"
    assert not golden_data.is_full()


def test_fresh_memory_is_poisoned() -> None:
    like = torch.zeros(3)
    fresh = [torch.empty(3), torch.empty_like(like), like.new_empty(3)]
    assert all(x.isnan().all() for x in fresh)
    assert torch.empty(2, dtype=torch.float8_e4m3fn).float().isnan().all()
    assert torch.empty(2, dtype=torch.int16).tolist() == [32767, 32767]
    assert torch.empty(2, requires_grad=True).requires_grad
