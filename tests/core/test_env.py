import os
import subprocess
import sys

import pytest

from moonlet.core import env
from moonlet.core.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "want"),
    [("", None), ("scalar", "scalar"), (" avx2 ", "avx2"), ("avx512", "avx512"), ("vnni", "vnni")],
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
    with pytest.raises(ConfigError, match="scalar, avx2, avx512, vnni"):
        env.cpu_isa_cap({"MOONLET_CPU_ISA": "AVX9"})
    with pytest.raises(ConfigError, match="MOONLET_DEBUG"):
        env.is_debug({"MOONLET_DEBUG": "maybe"})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONLET_CPU_ISA", "avx2")
    monkeypatch.setenv("MOONLET_DEBUG", "yes")
    assert env.cpu_isa_cap() == "avx2"
    assert env.is_debug()


def test_cores_are_those_given_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert env.available_cores() == 3
    monkeypatch.delattr(env.os, "sched_getaffinity")
    monkeypatch.setattr(env.os, "cpu_count", lambda: None)
    assert env.available_cores() == 1


@pytest.mark.parametrize(
    ("given", "wanted", "threads"), [("", None, 3), ("2", None, 2), ("2", 5, 5), ("", 4, 4)]
)
def test_threads_are_bounded_and_wait_passively(
    monkeypatch: pytest.MonkeyPatch, given: str, wanted: int | None, threads: int
) -> None:
    monkeypatch.setattr(env, "available_cores", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert env.bound_threads(wanted) == threads
    assert os.environ["OMP_NUM_THREADS"] == str(threads)
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_malformed_thread_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="many"):
        env.bound_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is asked on Linux only")
@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("train", None, "glibc.malloc.hugetlb=1"),
        ("train", "glibc.malloc.check=0", "glibc.malloc.check=0"),
        ("serve", None, "absent"),
    ],
)
def test_training_starts_anew_once_with_a_heap_of_huge_pages(
    command: str, given: str | None, expected: str
) -> None:
    script = (
        "import os, sys\n"
        "from moonlet.core import env\n"
        "print('started', flush=True)\n"
        "env.restart_with_huge_heap('train')\n"
        "print(os.environ.get('GLIBC_TUNABLES', 'absent').split(':')[0], *sys.argv[1:])\n"
    )
    variables = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if given is not None:
        variables["GLIBC_TUNABLES"] = given
    done = subprocess.run(
        [sys.executable, "-c", script, command, "a b", "--out=x"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    starts = 2 if expected.startswith("glibc.malloc.hugetlb") else 1
    assert done.stdout.split("\n")[:-1] == ["started"] * starts + [
        f"{expected} {command} a b --out=x"
    ]
