import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from moonlet.chat.bpe import tokenizer_files
from moonlet.cli.main import run
from moonlet.cli.synth import synth_command
from moonlet.core.budget import budget_of
from moonlet.core.hf_config import parse_config
from moonlet.core.units import format_bytes
from moonlet.testing import tiny_config
from moonlet.weights import synth
from moonlet.weights.checkpoint import Checkpoint
from moonlet.weights.folder import published_object
from moonlet.weights.scale import load_scale, scale_names
from tests.cli.checkpoints import RANKS, environment
from tests.patience import PATIENCE_S

Shown = pytest.CaptureFixture[str]


class Usage(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int
    used: int
    free: int


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of the tiny model."""
    file = tmp_path / "given.json"
    file.write_text(json.dumps(published_object(tiny_config())))
    return file


def shards(folder: Path) -> dict[str, bytes]:
    """Weight files of a checkpoint."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def failure(arguments: list[str], capsys: Shown, code: int = 2) -> str:
    """The one line that a refused command leaves on stderr."""
    assert run(["synth", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def test_the_folder_is_on_stdout_and_the_size_on_stderr(
    config: Path, tmp_path: Path, capsys: Shown
) -> None:
    out = tmp_path / "out"
    assert run(["synth", str(out), "--config", str(config)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    size = budget_of(parse_config(published_object(tiny_config()))).total_bytes
    assert captured.err == f"{size:,} bytes ({format_bytes(size)}) of weights, seed 0\n"
    assert Checkpoint.open(out).report.is_loadable
    assert run(["inspect", str(out)]) == 0


def test_json_replaces_the_folder_name(config: Path, tmp_path: Path, capsys: Shown) -> None:
    out = tmp_path / "out"
    assert run(["synth", str(out), "--config", str(config), "--seed", "7", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    checkpoint = Checkpoint.open(out)
    assert facts.pop("elapsed_s") >= 0
    assert facts == {
        "directory": str(out),
        "num_tensors": len(checkpoint.extents),
        "total_size": checkpoint.shards.total_size,
        "seed": 7,
    }


def test_the_architecture_comes_from_a_file_a_folder_or_a_table(
    config: Path, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert run(["synth", str(first), "--config", str(config)]) == 0
    assert run(["synth", str(second), "--config", str(first)]) == 0
    assert shards(first) == shards(second)
    nano = Path(__file__).parents[2] / "src/moonlet/train/recipes/nano.toml"
    assert run(["synth", str(third), "--config", str(nano)]) == 0
    assert Checkpoint.open(third).config.text.hidden_size == 128


def test_scales_differ(tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth.shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    for name, size in (("slab-224", "12.88 GB"), ("slab-896", "40.60 GB")):
        assert size in failure([str(tmp_path / "out"), "--scale", name], capsys, code=3)
    assert list(tmp_path.iterdir()) == []


def test_exactly_one_architecture_is_wanted(config: Path, tmp_path: Path, capsys: Shown) -> None:
    out = str(tmp_path / "out")
    for flags in ([], ["--scale", "slab-224", "--config", str(config)]):
        assert "slab-896" in failure([out, *flags], capsys)
    assert "k3-quarter" in failure([out, "--scale", "quarter"], capsys)
    assert "cannot read" in failure([out, "--config", str(tmp_path / "absent.json")], capsys)
    assert "cannot read" in failure([out, "--config", str(tmp_path / "absent.toml")], capsys)
    assert not Path(out).exists()


def test_the_seed_changes_the_weights(config: Path, tmp_path: Path) -> None:
    def made(name: str, *flags: str) -> dict[str, bytes]:
        assert run(["synth", str(tmp_path / name), "--config", str(config), *flags]) == 0
        return shards(tmp_path / name)

    default = made("default")
    assert made("zero", "--seed", "0") == default
    other = made("other", "--seed", "1")
    assert all(other[name] != content for name, content in default.items())


def test_only_force_replaces_a_checkpoint(config: Path, tmp_path: Path, capsys: Shown) -> None:
    out = tmp_path / "out"
    command = [str(out), "--config", str(config)]
    assert run(["synth", *command]) == 0
    before = shards(out)
    capsys.readouterr()
    assert "not empty" in failure([*command, "--seed", "1"], capsys)
    assert shards(out) == before
    assert run(["synth", *command, "--seed", "1", "--force"]) == 0
    assert shards(out) != before


def test_tokenizer_files_are_copied_when_asked_for(
    config: Path, tmp_path: Path, capsys: Shown
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, content in tokenizer_files(RANKS).items():
        (source / name).write_bytes(content)
    command = [str(tmp_path / "without"), "--config", str(config)]
    assert run(["synth", *command]) == 0
    assert not (tmp_path / "without" / "tiktoken.model").exists()
    command[0] = str(tmp_path / "with")
    assert run(["synth", *command, "--tokenizer", str(source)]) == 0
    assert (tmp_path / "with" / "tiktoken.model").exists()
    capsys.readouterr()
    other = [str(tmp_path / "other"), "--scale", "slab-224", "--tokenizer", str(source)]
    assert "512 tokens, the model 20480" in failure(other, capsys)


def test_the_help_states_the_scales_and_their_sizes() -> None:
    help_text = " ".join((synth_command.__doc__ or "").split())
    for name in scale_names():
        size = budget_of(parse_config(published_object(load_scale(name)))).total_bytes
        assert f"{name} ({size / 1e9:.1f} GB)" in help_text


def test_writing_loads_no_torch(config: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from moonlet.cli.main import run; "
        "code = run(['synth', sys.argv[1], '--config', sys.argv[2]]); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out"), str(config)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
