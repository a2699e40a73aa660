import copy
import dataclasses
from typing import Any

import pytest

from moonlet.core.errors import ConfigError
from moonlet.kernels import _native
from moonlet.kernels.registry import resolve
from moonlet.model.transformer import Transformer
from moonlet.train.init import check_tensors, initialize
from moonlet.train.recipe import Recipe, load_recipe, parse_recipe
from tests.train.runs import tiny_recipe


def test_the_nano_recipe_is_the_model_that_ships() -> None:
    recipe = load_recipe("nano")
    assert recipe.name == "nano"
    model = Transformer(recipe.model)
    count = sum(p.numel() for p in model.parameters())
    assert 3_000_000 < count < 4_000_000
    assert recipe.model.vocab_size == recipe.data.num_ranks + 256
    assert recipe.quantization.start_fraction == 0.75
    initialize(model, recipe.model, recipe.init)
    check_tensors(model, recipe.model, recipe.init)


@pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])
def test_the_nano_recipe_names_kernels_that_serve_it() -> None:
    recipe = load_recipe("nano")
    chosen = {c.op: c.backend for c in resolve("cpu", recipe.model, recipe.run.kernels).choices}
    assert {op: chosen[op] for op in recipe.run.kernels} == recipe.run.kernels


def test_a_recipe_survives_its_dictionary() -> None:
    for recipe in (tiny_recipe(), load_recipe("nano")):
        assert parse_recipe(recipe.to_dict()) == recipe


def changed(path: str, value: Any) -> dict[str, Any]:
    table = copy.deepcopy(load_recipe("nano").to_dict())
    *parents, leaf = path.split(".")
    target = table
    for parent in parents:
        target = target[parent]
    target[leaf] = value
    return table


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optimiser", {}, r"recipe\.optimiser is not a known key; did you mean optimizer\?"),
        ("model.hiden_size", 1, r"model\.hiden_size is not a known key; did you mean hidden_size"),
        ("schedule.total_steps", "many", r"total_steps is 'many'; it must be of type int"),
        ("schedule.total_steps", True, "total_steps is True"),
        ("schedule.total_steps", 1.5, r"total_steps is 1\.5"),
        ("model.kda", 3, r"recipe\.model\.kda is 3; it must be a table"),
        ("model.kda_layers", 3, "kda_layers is 3; it must be a list"),
        ("quantization.start_fraction", 2.0, "start_fraction is 2"),
        ("quantization.activations", "fp4", "mxfp8"),
        ("optimizer.clip_norm", 0.0, "clip_norm"),
        ("optimizer.betas", [0.9, 1.0], "betas"),
        ("data.num_shards", 0, "num_shards"),
    ],
)
def test_wrong_recipes_are_refused_by_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(changed(path, value))


def test_a_missing_section_is_named() -> None:
    table = load_recipe("nano").to_dict()
    del table["schedule"]
    with pytest.raises(ConfigError, match=r"recipe\.schedule is missing"):
        parse_recipe(table)


def test_unknown_recipes_list_the_shipped_ones(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="nano"):
        load_recipe("nanno")
    with pytest.raises(ConfigError, match="does not exist"):
        load_recipe(str(tmp_path / "absent.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_recipe(str(broken))


def test_the_digest_covers_what_decides_the_result() -> None:
    recipe = load_recipe("nano")

    def with_run(**changes: Any) -> Recipe:
        return dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, **changes))

    assert with_run(checkpoint_minutes=1.0).digest() == recipe.digest()
    assert with_run(qk_clip_tau=50.0).digest() != recipe.digest()
