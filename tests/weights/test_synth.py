import errno
import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonlet.chat.bpe import tokenizer_files
from moonlet.core.budget import budget_of
from moonlet.core.errors import CapacityError, CheckpointError, ConfigError
from moonlet.core.hf_config import parse_config
from moonlet.testing import tiny_config
from moonlet.weights import synth
from moonlet.weights.checkpoint import Checkpoint
from moonlet.weights.folder import leftovers, published_object
from moonlet.weights.random_values import Rule, random_bytes
from moonlet.weights.scale import load_scale
from moonlet.weights.synth import write_synthetic
from tests.core.published import small_config
from tests.patience import PATIENCE_S
from tests.weights.synthetic import contents, largest_logit, plan_size, values

INDEX = "model.safetensors.index.json"
NANO_RECIPE = Path(__file__).parents[2] / "src/moonlet/train/recipes/nano.toml"


class Usage(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int
    used: int
    free: int


# ---- layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn_res", [2, None], ids=["k3", "kimi_linear"])
def test_a_model_is_written_verified_loaded_and_run(attn_res: int | None, tmp_path: Path) -> None:
    config = tiny_config(attn_res_block_size=attn_res)
    steps: list[tuple[int, int]] = []
    saved = write_synthetic(config, tmp_path / "out", 0, lambda *step: steps.append(step))
    checkpoint = Checkpoint.open(saved.directory)
    assert checkpoint.report.is_loadable
    assert checkpoint.report.notes == ()
    assert checkpoint.config.text == config
    assert checkpoint.config.is_wrapped is (attn_res is not None)
    assert saved.num_tensors == len(checkpoint.extents)
    assert saved.total_size == budget_of(checkpoint.config).total_bytes
    assert checkpoint.shards.total_size == saved.total_size
    done = [step for step, _ in steps]
    assert {total for _, total in steps} == {saved.total_size}
    assert done[0] == 0
    assert done[-1] == saved.total_size
    assert done == sorted(set(done))
    assert 0.5 < largest_logit(saved.directory) < 50


def test_shards_are_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    folder = write_synthetic(small_config(), tmp_path / "out").directory
    shards = sorted(folder.glob("*.safetensors"))
    assert [shard.name for shard in shards][-1] == "model-00008-of-000008.safetensors"
    for shard in shards:
        save_file(load_file(shard), tmp_path / "again", metadata={"format": "pt"})
        assert shard.read_bytes() == (tmp_path / "again").read_bytes(), shard.name
    index = json.loads((folder / INDEX).read_text())
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["weight_map"]["language_model.lm_head.weight"] == shards[-1].name


def test_a_published_object_decides_the_layout_and_is_kept(tmp_path: Path) -> None:
    raw = published_object(small_config())
    raw["text_config"]["top_k"] = 7
    raw["vision_config"] = {
        "init_pos_emb_height": 3,
        "init_pos_emb_width": 5,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": 4,
        "patch_size": 2,
        "qkv_hidden_size": 6,
        "text_hidden_size": 40,
        "vt_hidden_size": 8,
        "vt_intermediate_size": 10,
        "vt_num_hidden_layers": 2,
    }
    saved = write_synthetic(raw, tmp_path / "out")
    assert json.loads((saved.directory / "config.json").read_text()) == raw
    checkpoint = Checkpoint.open(saved.directory)
    assert checkpoint.report.is_loadable
    # three projector tensors; three of the tower and six a block
    assert len(checkpoint.report.verified_not_loaded) == 3 + 3 + 2 * 6
    assert saved.total_size == budget_of(checkpoint.config).total_bytes
    # seven layers, tables, projector, tower
    assert len(checkpoint.shards.files) == 10


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_declared_dtypes_are_written(dtype: str, tmp_path: Path) -> None:
    raw = {**published_object(tiny_config(attn_res_block_size=None)), "dtype": dtype}
    folder = write_synthetic(raw, tmp_path / "out").directory
    assert Checkpoint.open(folder).report.is_loadable
    (head,) = values(folder, "lm_head.weight")
    assert head.dtype == getattr(torch, dtype)
    assert float(head.float().std()) == pytest.approx(1 / math.sqrt(32), rel=0.03)
    assert largest_logit(folder) > 0.5


# ---- memory --------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of slab-896, 40.6 GB, with pieces that are drawn once and files that vanish."""
    piece = next(iter(random_bytes(0, "x", Rule("codes"), "U8", 1 << 24, 1 << 24)))
    written = 0

    def reused(seed: int, name: str, rule: Rule, dtype: str, count: int) -> Iterator[memoryview]:
        nonlocal written
        size = count * {"BF16": 2, "F32": 4, "U8": 1}[dtype]
        written += size
        for start in range(0, size, len(piece)):
            yield piece[: size - start]

    monkeypatch.setattr(synth, "random_bytes", reused)
    shards = synth._Shards(parse_config(published_object(load_scale("slab-896"))))
    (tmp_path / "out").mkdir()
    for name in (f"model-{i:05d}-of-000004.safetensors" for i in range(1, 5)):
        (tmp_path / "out" / name).symlink_to("/dev/null")
    tracemalloc.start()
    saved = synth._write(shards, tmp_path / "out", 0, 40_595_653_632, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # two KDA layers pad 96 heads to 128 in float32
    assert saved.total_size == written + 2 * 32 * 4 == 40_595_653_632
    assert peak < 100e6


# ---- refusals and interruptions ------------------------------------------------------------------


def test_a_folder_that_holds_files_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        write_synthetic(tiny_config(), target)
    # nor is anything replaced that is no checkpoint
    with pytest.raises(ConfigError, match=r"no config\.json"):
        write_synthetic(tiny_config(), target, overwrite=True)
    assert contents(target) == {"notes.txt": b"mine"}
    (target / "notes.txt").unlink()
    write_synthetic(tiny_config(), target)
    before = contents(target)
    with pytest.raises(ConfigError, match="not empty"):
        write_synthetic(tiny_config(), target, 1)
    assert contents(target) == before
    (target / "stale.safetensors").touch()
    write_synthetic(tiny_config(), target, 1, overwrite=True)
    assert contents(target).keys() == before.keys()
    assert contents(target) != before
    assert list(tmp_path.iterdir()) == [target]


def test_an_empty_folder_may_be_overwritten_and_a_file_may_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_synthetic(tiny_config(), tmp_path / "empty", overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        write_synthetic(tiny_config(), tmp_path / "file", overwrite=True)
    with pytest.raises(ConfigError, match="cannot write"):
        write_synthetic(tiny_config(), tmp_path / "file" / "below")


def test_too_little_space_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = published_object(tiny_config())
    size = plan_size(raw)
    shards = synth._Shards(parse_config(raw))
    # headers and the index need something as well
    needed = size + 512 * sum(map(len, shards))
    asked: list[Path] = []

    def set_free(free: int) -> None:
        def answer(path: Path) -> Usage:
            asked.append(path)
            return Usage(10**15, 0, free)

        monkeypatch.setattr(synth.shutil, "disk_usage", answer)

    set_free(needed - 1)
    remains = tmp_path / ".out.abc.partial"
    remains.mkdir()
    with pytest.raises(CapacityError) as caught:
        write_synthetic(tiny_config(), tmp_path / "out")
    message = str(caught.value)
    assert f"needs {needed:,} bytes" in message
    assert f"has {needed - 1:,}" in message
    assert str(remains) in message
    deep = tmp_path / "not" / "yet" / "out"
    with pytest.raises(CapacityError) as caught:
        write_synthetic(tiny_config(), deep)
    assert ".partial" not in str(caught.value)
    # the nearest folder that exists is asked, and none is made
    assert asked == [tmp_path, tmp_path]
    assert list(tmp_path.iterdir()) == [remains]
    set_free(needed)
    folder = write_synthetic(tiny_config(), deep).directory
    assert sum(map(len, contents(folder).values())) <= needed


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(synth, "write_index", full)
    with pytest.raises(CapacityError, match="full"):
        write_synthetic(tiny_config(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "replacing"])
def test_an_interrupted_write_leaves_what_was_there(is_there: bool, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if is_there:
        write_synthetic(tiny_config(), target)
    before = contents(target) if is_there else None

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_synthetic(tiny_config(), target, 1, interrupt, overwrite=True)
    assert list(tmp_path.iterdir()) == ([target] if is_there else [])
    assert before is None or contents(target) == before


def test_a_killed_process_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from moonlet.weights.scale import read_model_table\n"
        "from moonlet.weights.synth import write_synthetic\n"
        "def kill(done, total):\n"
        "    if done > total // 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_synthetic(read_model_table(sys.argv[2]), sys.argv[1], 0, kill)\n"
    )
    target = tmp_path / "out"
    command = [sys.executable, "-c", script, str(target), str(NANO_RECIPE)]
    assert subprocess.run(command, timeout=PATIENCE_S).returncode == -9
    assert not target.exists()
    (remains,) = leftovers(target)
    assert list(tmp_path.iterdir()) == [remains]
    # another run is not disturbed by it, nor does it touch what could be someone else's
    write_synthetic(tiny_config(), target)
    assert Checkpoint.open(target).report.is_loadable
    assert leftovers(target) == [remains]


# ---- tokenizer -----------------------------------------------------------------------------------


def test_a_tokenizer_of_the_same_size_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    files = tokenizer_files({bytes((value,)): value for value in range(256)})
    for name, content in {**files, "other.txt": b"?"}.items():
        (source / name).write_bytes(content)
    folder = write_synthetic(tiny_config(), tmp_path / "out", tokenizer=source).directory
    written = contents(folder)
    assert {name: written[name] for name in files} == files
    assert "other.txt" not in written
    for vocab_size in (511, 513):
        config = tiny_config(vocab_size=vocab_size, pad_token_id=0)
        with pytest.raises(CheckpointError, match=f"512 tokens, the model {vocab_size}"):
            write_synthetic(config, tmp_path / "refused", tokenizer=source)
    shutil.rmtree(source)
    with pytest.raises(CheckpointError, match="no vocabulary"):
        write_synthetic(tiny_config(), tmp_path / "refused", tokenizer=source)
    assert not (tmp_path / "refused").exists()
