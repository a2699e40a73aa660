from dataclasses import replace
from pathlib import Path

import pytest

from moonlet.core.budget import budget_of
from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import parse_config
from moonlet.weights import synth
from moonlet.weights.folder import published_object
from moonlet.weights.scale import load_scale, read_model_table, scale_names
from tests.core.published import k3, kimi_linear_48b
from tests.weights.synthetic import plan_size

NANO_RECIPE = Path(__file__).parents[2] / "src/moonlet/train/recipes/nano.toml"


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("k3-quarter", 7_409_805_824),
        ("slab-224", 12_882_439_936),
        ("slab-896", 40_595_653_632),
    ],
)
def test_named_scales_have_the_stated_sizes(name: str, num_bytes: int) -> None:
    raw = published_object(load_scale(name))
    assert parse_config(raw).text == load_scale(name)
    assert budget_of(parse_config(raw)).total_bytes == num_bytes
    assert plan_size(raw) == num_bytes


def test_the_scales_are_parts_of_k3() -> None:
    assert scale_names() == ["k3-quarter", "slab-224", "slab-896"]
    real, small = parse_config(k3()).text, load_scale("slab-224")
    slab, quarter = load_scale("slab-896"), load_scale("k3-quarter")
    shape = {"num_hidden_layers": 3, "kda_layers": (0, 1), "moe_layers": (1, 2)}
    assert slab == replace(real, **shape)
    assert small == replace(
        slab,
        vocab_size=20480,
        bos_token_id=20224,
        eos_token_id=20226,
        pad_token_id=20479,
        moe=replace(slab.moe, num_experts=224),
    )
    assert quarter == replace(
        real,
        hidden_size=3584,
        num_hidden_layers=9,
        intermediate_size=16896,
        kda_layers=(0, 1, 2, 4, 5, 6),
        moe_layers=tuple(range(1, 9)),
        kda=replace(real.kda, num_heads=48),
        mla=replace(real.mla, num_attention_heads=48, q_lora_rank=768),
        moe=replace(
            real.moe,
            num_experts=64,
            moe_intermediate_size=1536,
            routed_expert_hidden_size=1792,
        ),
    )


def test_released_configurations_have_their_known_totals() -> None:
    assert plan_size(kimi_linear_48b()) == 98_245_541_888
    raw = k3()
    # all experts are 497,220 tensors; a few of each layer show the same
    raw["text_config"]["num_experts"] = 16
    assert plan_size(raw) == budget_of(parse_config(raw)).total_bytes
    assert len(synth._Shards(parse_config(raw))) == 96


def test_model_tables_are_read_strictly(tmp_path: Path) -> None:
    text = NANO_RECIPE.read_text()
    assert read_model_table(NANO_RECIPE).hidden_size == 128
    file = tmp_path / "model.toml"
    for changed, message in (
        (text.replace("hidden_size", "hiden_size"), "did you mean hidden_size"),
        (text.replace("num_experts = 32", 'num_experts = "many"'), "model.moe.num_experts"),
        (text.replace("[model", "[mode"), r"no \[model\] table"),
        ("= 3", "not valid TOML"),
    ):
        file.write_text(changed)
        with pytest.raises(ConfigError, match=message):
            read_model_table(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_model_table(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_model_table(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="k3-quarter"):
        load_scale("slab")
