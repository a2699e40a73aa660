import subprocess
import sys
from pathlib import Path

import pytest

from moonlet.bench import plots
from moonlet.cli.main import run
from moonlet.core.errors import ConfigError

COMMANDS = {
    "kernels": ["--op", "swiglu", "--rows", "1,2", "--repeats", "1", "--scale", "nano"],
    "engine": ["--streams", "1,2", "--output-len", "3", "--repeats", "1", "--prefill", "2,4"],
    "longctx": ["--context", "8,16", "--repeats", "1"],
}


def command(name: str, checkpoint: Path, plot: Path) -> list[str]:
    folder = [] if name == "kernels" else [str(checkpoint)]
    return ["bench", name, *folder, *COMMANDS[name], "--plot", str(plot)]


@pytest.mark.parametrize("name", COMMANDS)
def test_without_matplotlib_nothing_is_measured(
    name: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(command(name, checkpoint, tmp_path / "plot.png")) == 2
    printed = capsys.readouterr()
    assert "pip install 'moonlet[report]'" in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_plot_is_written(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plot was drawn")
    assert run(command(name, checkpoint, tmp_path / "plot.png")) == 0
    assert run(command(name, checkpoint, tmp_path / "plot.svg")) == 0
    assert capsys.readouterr().out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()


def test_a_file_that_cannot_be_drawn_is_said_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plot was checked")
    with pytest.raises(ConfigError, match=r"end it in one of .*png"):
        plots.check_plot(tmp_path / "plot.doc")
    with pytest.raises(ConfigError, match="folder does not exist"):
        plots.check_plot(tmp_path / "none" / "plot.png")
    plots.check_plot(tmp_path / "plot.png")


def test_importing_the_benchmarks_imports_no_matplotlib() -> None:
    script = (
        "import sys, moonlet.bench.plots, moonlet.bench.engine, moonlet.bench.longctx\n"
        "import moonlet.bench.kernels, moonlet.bench.check, moonlet.cli.bench\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
