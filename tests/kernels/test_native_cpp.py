"""The C++ tests of the native library, against the library in use; see also `make sanitize`."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moonlet.kernels import _native

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "src" / "moonlet" / "kernels" / "csrc"
TESTS = ROOT / "tests" / "native"
PROGRAMS = sorted(TESTS.glob("*.cpp"))

FAILING = """
#include "check.h"

int main() {
  CASE("a case", 3, 17);
  CHECK(1 + 1 == 3);
  test::compare([](int32_t, int32_t) { return MOONLET_OK; }, {});
  return test::finish();
}
"""


def built(source: Path, folder: Path) -> Path:
    """Compile a test against the library; skips where there is nothing to compile it with."""
    compiler, library = shutil.which("c++"), _native._library_path()
    if compiler is None or library is None:
        missing = "c++ is not installed" if compiler is None else "the native library is not built"
        assert os.environ.get("MOONLET_BUILD_NATIVE") != "1", missing
        pytest.skip(missing)
    program = folder / source.stem
    command = [compiler, "-std=c++17", "-O1", "-I", str(CSRC), "-I", str(TESTS)]
    command += [str(source), str(library)]
    command += [f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("source", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_finds_nothing(source: Path, tmp_path: Path) -> None:
    done = subprocess.run([built(source, tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"\d+ checks, 0 failed\n", done.stdout)


def test_a_check_that_does_not_hold_is_named_and_fails_the_program(tmp_path: Path) -> None:
    source = tmp_path / "failing.cpp"
    source.write_text(FAILING)
    done = subprocess.run([built(source, tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    place = re.escape(f"{source}:6: does not hold: 1 + 1 == 3")
    assert re.match(rf"{place} \[{re.escape(str(source))}:5: a case 3 17; level 0", done.stdout)
    # a library that takes any level and no threads would be found out
    assert "call(-1, 1) == MOONLET_BAD_ISA" in done.stdout
    assert "call(0, 0) == MOONLET_BAD_ARGUMENT" in done.stdout


def test_every_function_of_the_interface_is_called() -> None:
    text = "".join(path.read_text() for path in PROGRAMS)
    called = set(re.findall(r"\b(moonlet_\w+)\(", text))
    assert called == set(_native.PROTOTYPES)


def test_the_build_knows_every_program() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    match = re.search(r"foreach\(name ([\w\s]+)\)", text)
    assert match is not None
    assert sorted(match.group(1).split()) == [path.stem for path in PROGRAMS]
