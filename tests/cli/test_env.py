import json

import pytest

import moonlet
from moonlet.cli.env import env_command
from moonlet.core.errors import ConfigError
from moonlet.kernels import _native, registry


def test_json_holds_versions_and_a_reason_for_every_operator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env_command(json_output=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["moonlet"] == moonlet.__version__
    assert facts["packages"]["torch"] != "not installed"
    assert facts["isa_level"] == _native.isa_level()
    rows = {row["op"]: row for row in facts["kernels"]}
    assert set(rows) == {*registry.OPERATORS, "mxfp4_dequantize"}
    assert all(row["backend"] and row["reason"] for row in rows.values())


def test_text_names_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    env_command()
    out = capsys.readouterr().out
    assert moonlet.__version__ in out
    for op in registry.OPERATORS:
        assert op in out


def test_absent_native_kernels_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "_load", lambda: (None, "native kernels: not built"))
    env_command()
    out = capsys.readouterr().out
    assert any(line.split() == ["native", "kernels", "not", "built"] for line in out.splitlines())
    row = next(line for line in out.splitlines() if line.startswith("mxfp4_dequantize"))
    assert "reference" in row
    assert "not built" in row


def test_a_malformed_level_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONLET_CPU_ISA", "avx3")
    with pytest.raises(ConfigError, match="MOONLET_CPU_ISA"):
        env_command(json_output=True)
