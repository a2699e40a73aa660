from pathlib import Path

import pytest

from moonlet.cli.main import run


def test_an_unknown_recipe_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "nanno", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "nanno" in error
    assert "nano" in error
    assert len(error.strip().splitlines()) == 1


def test_nothing_to_resume_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "nano", "--out", str(tmp_path), "--resume"]) == 2
    assert "no checkpoint to resume" in capsys.readouterr().err
