import pytest

from moonlet.core import env
from moonlet.core.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "want"),
    [("", None), ("scalar", "scalar"), (" avx2 ", "avx2"), ("avx512", "avx512"), ("amx", "amx")],
)
def test_the_isa_cap_is_read(value: str, want: str | None) -> None:
    assert env.cpu_isa_cap({"MOONLET_CPU_ISA": value}) == want
    assert env.cpu_isa_cap({}) is None


@pytest.mark.parametrize(
    ("value", "want"), [("1", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_debug_is_read(value: str, want: bool) -> None:
    assert env.is_debug({"MOONLET_DEBUG": value}) is want
    assert env.is_debug({}) is False


def test_a_malformed_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match="scalar, avx2, avx512, amx"):
        env.cpu_isa_cap({"MOONLET_CPU_ISA": "AVX9"})
    with pytest.raises(ConfigError, match="MOONLET_DEBUG"):
        env.is_debug({"MOONLET_DEBUG": "maybe"})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONLET_CPU_ISA", "avx2")
    monkeypatch.setenv("MOONLET_DEBUG", "yes")
    assert env.cpu_isa_cap() == "avx2"
    assert env.is_debug()
