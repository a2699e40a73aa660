import ctypes
import math
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moonlet.core import env
from moonlet.core.errors import BackendUnavailable, ConfigError, ShapeError
from moonlet.kernels import _native, mxfp4

CSRC = Path(__file__).parents[2] / "src" / "moonlet" / "kernels" / "csrc"
SCALARS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}

needs_native = pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])


def prototypes() -> dict[str, tuple[object, ...]]:
    """Every function of moonlet.h with the ctypes of its arguments."""
    header = re.sub(r"/\*.*?\*/", "", (CSRC / "moonlet.h").read_text(), flags=re.DOTALL)
    found = {}
    pattern = r"MOONLET_API\s+int32_t\s+(\w+)\s*\((.*?)\)\s*;"
    for name, arguments in re.findall(pattern, header, flags=re.DOTALL):
        types = [a.strip() for a in arguments.split(",") if a.strip() != "void"]
        found[name] = tuple(
            ctypes.c_void_p if "*" in a else SCALARS[a.removeprefix("const ").split()[0]]
            for a in types
        )
    assert len(found) == header.count("MOONLET_API ") - 1, "a prototype was not understood"
    return found


def test_the_argument_table_equals_the_header() -> None:
    assert prototypes() == _native.PROTOTYPES


def test_the_abi_version_equals_the_header() -> None:
    match = re.search(r"#define MOONLET_ABI_VERSION (\d+)", (CSRC / "moonlet.h").read_text())
    assert match is not None
    assert int(match.group(1)) == _native.ABI_VERSION


@needs_native
def test_the_library_exports_the_interface_and_nothing_else() -> None:
    assert exported("--dynamic") == set(prototypes())


def exported(*options: str) -> set[str]:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    path = _native._library_path()
    assert path is not None
    lines = subprocess.run(
        [nm, "--defined-only", *options, str(path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {name for _, kind, name in map(str.split, lines) if kind in "TDBRVW"}


def isa_flags() -> dict[str, list[str]]:
    """The compiler flags of each instruction-set level, as the build gives them."""
    text = (CSRC.parents[3] / "CMakeLists.txt").read_text()
    return {
        level: flags.split()
        for level, flags in re.findall(r"^\s*moonlet_isa\((\w+)([^)]*)\)", text, re.MULTILINE)
    }


ISA_SOURCES = [p for p in sorted(CSRC.glob("*.cpp")) if "namespace MOONLET_ISA" in p.read_text()]


@pytest.mark.parametrize("level", isa_flags())
@pytest.mark.parametrize("source", ISA_SOURCES, ids=lambda path: path.stem)
def test_an_isa_file_has_no_symbol_the_linker_could_share(
    source: Path, level: str, tmp_path: Path
) -> None:
    compiler, nm = shutil.which("c++"), shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("c++ or nm is not installed")
    if level != "scalar" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the level is compiled on x86-64 only")
    out = tmp_path / "source.o"
    defines = [f"-DMOONLET_ISA={level}", f"-DMOONLET_ISA_{level}=1"]
    command = [compiler, "-std=c++17", "-O2", "-w", "-fPIC", *isa_flags()[level], *defines]
    subprocess.run([*command, "-c", str(source), "-o", str(out)], check=True)
    lines = subprocess.run([nm, str(out)], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-2:] for line in lines.splitlines()]
    assert [name for kind, name in symbols if kind in "VWvwu"] == []
    shared = [name for kind, name in symbols if kind in "TDBR"]
    assert shared
    assert all(level in name for name in shared)


@needs_native
def test_levels_start_at_scalar_and_a_cap_lowers_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = _native.isa_levels()
    assert levels[0] == "scalar"
    monkeypatch.delenv("MOONLET_CPU_ISA", raising=False)
    assert _native.isa_level() == levels[-1]
    for level in env.CPU_ISA_LEVELS:
        monkeypatch.setenv("MOONLET_CPU_ISA", level)
        assert _native.isa_level() == (level if level in levels else levels[-1])
    monkeypatch.setenv("MOONLET_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="avx512"):
        _native.isa_level()


@needs_native
def test_wrappers_refuse_what_the_library_would_misread() -> None:
    packed = torch.zeros(4, 32, dtype=torch.uint8)
    scale = torch.zeros(4, 2, dtype=torch.uint8)
    out = torch.zeros(4, 64)
    call = _native.mxfp4_dequantize
    with pytest.raises(ShapeError, match="contiguous"):
        call(packed.T.contiguous().T, scale, out)
    with pytest.raises(ShapeError, match="dtype"):
        call(packed, scale, out.double())
    with pytest.raises(ShapeError, match="shape"):
        call(packed[:3], scale, out)
    with pytest.raises(ShapeError, match="shape"):
        call(packed, scale[:, :1].contiguous(), out)
    with pytest.raises(ShapeError, match="move it"):
        call(packed.to("meta"), scale, out)
    with pytest.raises(BackendUnavailable, match="sse9"):
        call(packed, scale, out, isa="sse9")


@needs_native
def test_the_library_itself_refuses_bad_arguments() -> None:
    library, _ = _native._load()
    assert library is not None
    packed = torch.zeros(16, dtype=torch.uint8)
    scale = torch.zeros(1, dtype=torch.uint8)
    out = torch.zeros(32)
    pointers = [x.data_ptr() for x in (packed, scale, out)]
    call = library.moonlet_mxfp4_dequantize_f32
    assert call(*pointers, 1, 1, 16, 1, 32, 0, 1) == 0
    assert call(*pointers, -1, 1, 16, 1, 32, 0, 1) == 1
    assert call(*pointers, 1, 1, 15, 1, 32, 0, 1) == 1
    assert call(*pointers, 1, 1, 16, 1, 32, 0, 0) == 1
    assert call(None, *pointers[1:], 1, 1, 16, 1, 32, 0, 1) == 1
    assert call(*pointers, 1, 1, 16, 1, 32, 9, 1) == 2


@pytest.mark.parametrize("level", _native.isa_levels())
def test_threads_and_row_boundaries_do_not_change_the_result(level: str) -> None:
    generator = torch.Generator().manual_seed(21)
    packed = torch.randint(0, 256, (1031, 1024), dtype=torch.uint8, generator=generator)
    scale = torch.randint(90, 160, (1031, 64), dtype=torch.uint8, generator=generator)
    want = mxfp4.dequantize(packed, scale, backend="reference")
    for num_threads in (1, 2, 3, 1000):
        out = torch.full((1031, 2048), math.nan)
        _native.mxfp4_dequantize(packed, scale, out, isa=level, num_threads=num_threads)
        assert torch.equal(out, want)


@pytest.mark.parametrize("level", _native.isa_levels())
def test_subnormals_survive_a_thread_that_flushes_them(level: str) -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scale = torch.zeros(16, 1, dtype=torch.uint8)
    want = mxfp4.dequantize(packed, scale, backend="reference")
    out = torch.full((16, 32), math.nan)
    assert torch.set_flush_denormal(True)
    try:
        _native.mxfp4_dequantize(packed, scale, out, isa=level)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(out.view(torch.int32), want.view(torch.int32))


def test_a_demanded_library_is_built() -> None:
    """Without this, a run in which every native test is skipped would pass."""
    is_built, reason = _native.availability()
    assert is_built or os.environ.get("MOONLET_BUILD_NATIVE") != "1", reason


def test_an_absent_library_fails_the_run_that_demands_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_load", lambda: (None, "native kernels: not built"))
    monkeypatch.setenv("MOONLET_BUILD_NATIVE", "1")
    with pytest.raises(AssertionError, match="not built"):
        test_a_demanded_library_is_built()
    monkeypatch.delenv("MOONLET_BUILD_NATIVE")
    test_a_demanded_library_is_built()


def test_an_absent_library_is_said_and_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_native, "_load", lambda: (None, "native kernels: not built"))
    assert _native.availability() == (False, "native kernels: not built")
    assert _native.isa_level() is None
    assert _native.isa_levels() == ()
    packed = torch.arange(16, dtype=torch.uint8)
    scale = torch.tensor([127], dtype=torch.uint8)
    assert mxfp4.dequantize(packed, scale)[2:4].tolist() == [0.5, 0.0]
    with pytest.raises(BackendUnavailable, match="not built"):
        mxfp4.dequantize(packed, scale, backend="cpu")
