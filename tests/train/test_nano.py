"""The whole path on a model too small to learn: tokenizer, steps, resume, export, evaluation."""

import dataclasses
import json
from pathlib import Path

import pytest

from moonlet.chat.tokenizer import Tokenizer
from moonlet.core.errors import CheckpointError, ConfigError
from moonlet.core.units import format_count
from moonlet.testing.tiny import tiny_config
from moonlet.train import nano
from moonlet.train.checkpoint import latest_checkpoint
from moonlet.train.recipe import DataOptions, Recipe, parse_recipe
from moonlet.train.schedule import CosineSchedule
from moonlet.weights.checkpoint import load_model
from tests.train.runs import tiny_recipe


def small_recipe() -> Recipe:
    # the smallest vocabulary: 256 bytes, no merges
    return tiny_recipe(
        tiny_config(max_position_embeddings=8192),
        schedule=CosineSchedule(peak_lr=1e-3, total_steps=4),
        data=DataOptions(tokens_per_step=6000, num_shards=2, num_ranks=256, tokenizer_samples=20),
    )


@pytest.mark.slow
def test_a_run_from_nothing_to_an_evaluated_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nano, "MAX_REPLY_TOKENS", 3)
    monkeypatch.setattr(nano, "EVAL_MAX_LEN", 8192)
    recipe, out = small_recipe(), tmp_path / "run"
    seen: list[str] = []
    first = nano.train(
        recipe,
        out,
        max_minutes=0.0,
        evaluation_count=0,
        callbacks=nano.Callbacks(on_stage=seen.append),
    )
    assert seen == ["tokenizer", "training", "export"]
    assert not first.is_complete
    assert latest_checkpoint(out / "checkpoints").name == "step-00000001"
    assert json.loads((out / "recipe.json").read_text()) == recipe.to_dict()

    with pytest.raises(ConfigError, match="holds a run already"):
        nano.train(recipe, out)

    steps: list[int] = []
    result = nano.train(
        recipe,
        out,
        resume=True,
        processes=1,
        evaluation_count=1,
        callbacks=nano.Callbacks(on_step=lambda m: steps.append(m.step)),
    )
    assert result.is_complete
    assert steps == [2, 3, 4]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert load_model(result.model).config.text == recipe.model
    assert Tokenizer.from_dir(result.model).vocab_size == 512
    assert result.report == json.loads((out / "evaluation.json").read_text())
    assert result.report["families"]["arithmetic"]["accuracy"] == 0
    card = (result.model / "README.md").read_text()
    tokens = json.loads(lines[-1])["tokens_seen"]
    assert f"4 steps, {format_count(tokens)} tokens" in card
    assert "| add or subtract up to three digits | 0.0% | 97% |" in card
    assert "not** Kimi K3" in card
    assert json.loads((result.model / "evaluation.json").read_text()) == result.report
    assert parse_recipe(json.loads((result.model / "recipe.json").read_text())) == recipe


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume"):
        nano.train(small_recipe(), tmp_path, resume=True)


def test_the_vocabulary_must_match_the_model(tmp_path: Path) -> None:
    recipe = dataclasses.replace(
        small_recipe(), model=tiny_config(vocab_size=640, pad_token_id=600)
    )
    with pytest.raises(ConfigError, match=r"vocab_size is 640 but the tokenizer has 512"):
        nano.make_tokenizer(recipe, tmp_path / "tokenizer")


def test_a_seed_replaces_both_seeds() -> None:
    recipe = nano.with_seed(small_recipe(), 77)
    assert recipe.init.seed == recipe.data.seed == 77
    assert recipe.model == small_recipe().model
