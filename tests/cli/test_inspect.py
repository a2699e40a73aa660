import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonlet.cli.inspect import inspect_command
from moonlet.core.errors import ConfigError, CorruptShard
from tests.golden_data import count_vectors, golden_dir, require
from tests.weights import tampering
from tests.weights.tampering import LAYER, SHARD, copied, golden_checkpoint


def test_a_whole_checkpoint_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_command(golden_checkpoint("tiny_k3")) == 0
    out = capsys.readouterr().out
    for words in (
        "10: 7 KDA, 3 MLA",
        "AttnRes, blocks of 4 layers",
        "3,012,664 (3.01 M)",
        "3,450,896 (3.45 MB)",
        "weights: present",
        "1,126 tensors",
        "none is missing",
    ):
        assert words in out


def test_the_release_without_weights_exits_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = require(golden_dir("model") / "k3_release")
    (tmp_path / "config.json").write_bytes((release / "config.json").read_bytes())
    index = gzip.decompress((release / "model.safetensors.index.json.gz").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    assert inspect_command(tmp_path) == 0
    out = capsys.readouterr().out
    for words in (
        "weights: absent",
        "497,220 tensor names: 497,052 of the text model",
        "168 vision tensors: verified by name, not loaded",
        "1,560,860,324,864",
        "104,189,614,848",
        "434,110,464",
        "15,261,696",
        "449,372,160",
    ):
        assert words in out
    count_vectors(1)


def test_json_holds_architecture_budget_and_verification(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inspect_command(golden_checkpoint("tiny_k3"), json_output=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"]["hidden_size"] == 96
    assert facts["architecture"]["kda"]["num_heads"] == 4
    assert facts["budget"]["bytes"]["total"] == 3_450_896
    assert facts["verification"]["ok"]
    assert facts["verification"]["num_loaded"] == 1126
    assert "text_config.top_k" in facts["ignored_config_keys"]


def test_missing_shards_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied("tiny_k3", tmp_path)
    (folder / SHARD).unlink()
    assert inspect_command(folder) == 1
    out = capsys.readouterr().out
    assert "weights: partial" in out
    assert f"problem: 1 missing shards: {SHARD}" in out
    assert inspect_command(folder, json_output=True) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["verification"]["missing_shards"] == [SHARD]


def test_only_a_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = golden_checkpoint("tiny_k3")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert inspect_command(tmp_path) == 0
    out = capsys.readouterr().out
    assert "weights: absent" in out
    assert "tensor names" not in out


def test_problems_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied("tiny_k3", tmp_path)
    name = LAYER + "self_attn.o_proj.weight"
    tampering.rename(folder, SHARD, name, name + "s")
    assert inspect_command(folder) == 1
    out = capsys.readouterr().out
    assert f"problem: 1 missing: {name}\n" in out
    assert f"problem: 1 unexpected: {name}s\n" in out


def test_unusable_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        inspect_command(tmp_path)
    folder = copied("tiny_k3", tmp_path)
    (folder / SHARD).write_bytes(b"")
    with pytest.raises(CorruptShard, match=SHARD):
        inspect_command(folder)


def test_inspecting_loads_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from moonlet.cli.inspect import inspect_command; "
        "inspect_command(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    folder = golden_checkpoint("tiny_k3")
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr
