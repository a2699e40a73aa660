import json
from pathlib import Path

import pytest
import torch

from moonlet.bench.engine import bench_engine, touched_bytes
from moonlet.bench.memory import read_bandwidth
from moonlet.cli.main import run
from moonlet.core.errors import ConfigError
from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_config
from moonlet.train.init import initialize
from moonlet.train.recipe import InitOptions
from moonlet.weights.writer import save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    model = Transformer(config)
    initialize(model, config, InitOptions(seed=0))
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    save_model(model, folder, config)
    return folder


def test_report_relates_speed_to_the_bound(checkpoint: Path) -> None:
    seen = []
    report = bench_engine(
        checkpoint, streams=(1, 4), prompt_len=5, output_len=6, repeats=3, on_run=seen.append
    )
    assert [r.streams for r in seen] == [1, 4] * 3
    assert json.loads(json.dumps(report)) == report
    for row in report["results"]:
        assert (
            row["tokens_per_s"]
            == sorted(r.tokens_per_s for r in seen if r.streams == row["streams"])[1]
        )
        bound = row["streams"] * report["read_bandwidth_bytes_per_s"] / row["weight_bytes_per_step"]
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / bound)
        assert row["forward_calls"] <= 6 + 4
    one, four = report["results"]
    assert 0 < one["distinct_experts"] <= four["distinct_experts"]
    assert one["weight_bytes_per_step"] < four["weight_bytes_per_step"]


def test_touched_bytes_count_used_experts_and_table_rows_only() -> None:
    config = tiny_config()
    model = Transformer(config)
    assert config.moe is not None
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    table = config.vocab_size * config.hidden_size * 4
    all_used = touched_bytes(model, config.vocab_size, config.moe.num_experts)
    assert all_used == everything
    one_row = touched_bytes(model, 1, config.moe.num_experts)
    assert everything - one_row == table - config.hidden_size * 4
    expert = 3 * config.expert_input_size * config.moe.moe_intermediate_size * 4
    fewer = touched_bytes(model, 1, config.moe.num_experts - 1)
    assert one_row - fewer == expert * len(config.moe_layers)


def test_bandwidth_is_that_of_a_memory() -> None:
    assert 1e8 < read_bandwidth(repeats=1) < 1e13


def test_bad_counts_are_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="streams is 0"):
        bench_engine(checkpoint, streams=(0,))
    assert run(["bench", "engine", str(checkpoint), "--repeats", "0"]) == 2
    assert "bench.repeats is 0" in capsys.readouterr().err
    assert run(["bench", "engine", str(checkpoint), "--threads", "0"]) == 2
    assert "--threads is 0" in capsys.readouterr().err


def test_command_prints_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    arguments = ["--streams", "1", "--output-len", "3", "--repeats", "1", "--json"]
    assert run(["bench", "engine", str(checkpoint), *arguments]) == 0
    torch.set_num_threads(threads)
    report = json.loads(capsys.readouterr().out)
    assert [row["streams"] for row in report["results"]] == [1]
