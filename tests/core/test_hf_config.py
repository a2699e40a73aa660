import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonlet.core.config import KDAConfig
from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import CheckpointConfig, parse_config, read_config, to_published
from tests.core.published import k3, kimi_linear_48b, small_config
from tests.golden_data import count_vectors, golden_dir, require


def renamed(raw: dict[str, Any]) -> dict[str, Any]:
    """A bare config under the field names that transformers gives it."""
    raw = copy.deepcopy(raw)
    linear = raw.pop("linear_attn_config")
    full = set(linear["full_attn_layers"])
    num_layers = raw["num_hidden_layers"]
    raw["layer_types"] = [
        "full_attention" if i + 1 in full else "linear_attention" for i in range(num_layers)
    ]
    raw["linear_num_heads"] = linear["num_heads"]
    raw["linear_head_dim"] = linear["head_dim"]
    raw["linear_conv_kernel_dim"] = linear["short_conv_kernel_size"]
    first = raw.pop("first_k_dense_replace")
    raw.pop("moe_layer_freq")
    raw["mlp_layer_types"] = ["dense" if i < first else "sparse" for i in range(num_layers)]
    for old, new in (
        ("num_expert_group", "n_group"),
        ("moe_renormalize", "norm_topk_prob"),
        ("num_experts", "num_local_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
    ):
        raw[new] = raw.pop(old)
    return raw


def with_text(**values: Any) -> dict[str, Any]:
    raw = k3()
    raw["text_config"].update(values)
    return raw


def with_quantization(**values: Any) -> dict[str, Any]:
    raw = k3()
    raw["text_config"]["quantization_config"].update(values)
    return raw


def test_the_k3_wrapper_is_read() -> None:
    config = parse_config(k3())
    text = config.text
    assert config.is_wrapped
    assert config.model_type == "kimi_k3"
    assert config.quantization is not None
    assert config.quantization.group_size == 32
    assert config.vision is not None
    assert config.eos_token_ids == (163586,)
    assert config.media_placeholder_token_id == 163605
    assert text.mla_layers == (*range(3, 92, 4), 92)
    assert len(text.kda_layers) == 69
    assert text.dense_layers == (0,)
    assert text.kda == KDAConfig(
        num_heads=96, head_dim=128, gate_lower_bound=-5.0, use_full_rank_gate=True
    )
    assert text.mla.cache_size == 576
    assert text.moe is not None
    assert text.moe.moe_renormalize
    assert text.moe.shared_intermediate_size == 6144
    assert text.expert_input_size == 3584


def test_the_released_k3_file_equals_its_table() -> None:
    config = read_config(require(golden_dir("model") / "k3_release" / "config.json"))
    table = parse_config(k3())
    assert config.text == table.text
    assert config.quantization == table.quantization
    count_vectors(1)


def test_a_bare_config_is_read() -> None:
    config = parse_config(kimi_linear_48b())
    assert not config.is_wrapped
    assert config.model_type == "kimi_linear"
    assert config.quantization is None
    assert config.vision is None
    text = config.text
    assert text.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert text.kda.gate_lower_bound is None
    assert not text.kda.use_full_rank_gate
    assert text.mla.q_lora_rank is None
    assert not text.mla.mla_use_output_gate
    assert text.attn_res_block_size is None
    assert text.moe is not None
    assert text.moe.routed_expert_hidden_size is None
    assert text.moe.routed_scaling_factor == 2.446
    assert text.expert_input_size == 2304
    assert text.max_position_embeddings == 1048576


def test_renamed_fields_mean_the_same() -> None:
    assert parse_config(renamed(kimi_linear_48b())).text == parse_config(kimi_linear_48b()).text


def test_explicit_layer_types_win_over_any_pattern() -> None:
    raw = renamed(kimi_linear_48b())
    raw["layer_types"] = ["full_attention", *["linear_attention"] * 26]
    assert parse_config(raw).text.mla_layers == (0,)


def test_two_spellings_must_agree() -> None:
    with pytest.raises(ConfigError, match="n_shared_experts"):
        parse_config({**kimi_linear_48b(), "n_shared_experts": 3})
    agreeing = {**kimi_linear_48b(), "n_shared_experts": 1}
    assert parse_config(agreeing).text == parse_config(kimi_linear_48b()).text


def test_unknown_keys_are_named_with_their_path() -> None:
    with pytest.raises(ConfigError, match=r"text_config\.attn_sink"):
        parse_config(with_text(attn_sink=True))
    with pytest.raises(ConfigError, match="audio_config"):
        parse_config({**k3(), "audio_config": {}})
    raw = k3()
    raw["text_config"]["linear_attn_config"]["negative_eigenvalues"] = True
    with pytest.raises(ConfigError, match=r"linear_attn_config\.negative_eigenvalues"):
        parse_config(raw)


def test_boilerplate_changes_nothing() -> None:
    raw = with_text(top_k=7, use_cache=False, head_dim=74, rope_theta=5.0, transformers_version="9")
    assert parse_config(raw).text == parse_config(k3()).text


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (with_text(mla_use_nope=False), "mla_use_nope"),
        (with_text(num_key_value_heads=8), "num_key_value_heads"),
        (with_text(tie_word_embeddings=True), "tie_word_embeddings"),
        (with_text(attention_bias=True), "attention_bias"),
        (with_text(quantization_config={}), "quant_method"),
        ({**k3(), "quantization_config": {"format": "other"}}, "differs between the wrapper"),
        (with_text(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
        (with_text(hidden_act="gelu"), "hidden_act"),
        (with_text(hidden_size="7168"), "hidden_size"),
        (with_text(hidden_size=0), "hidden_size"),
        (with_text(kv_lora_rank=None), "kv_lora_rank"),
        (with_text(num_experts_per_token=900), "num_experts_per_token"),
        (with_text(moe_router_activation_func="relu"), "moe_router_activation_func"),
        (with_text(num_expert_group=5), "num_expert_group"),
        (with_text(routed_expert_hidden_size=None), "routed_expert_hidden_size"),
        (with_text(moe_layer_freq=0), "moe_layer_freq"),
        (with_text(eos_token_id=163840), "eos_token_id"),
        (with_text(layer_types=["linear_attention"] * 3), "layer_types"),
        ({**k3(), "text_config": []}, "text_config"),
        (with_text(layer_types=5), "layer_types"),
        (with_text(mlp_layer_types=["sparse", 1]), "mlp_layer_types"),
        (with_text(linear_attn_config="none"), "linear_attn_config"),
        (with_text(eos_token_id=["x"]), "eos_token_id"),
        ({**k3(), "eos_token_id": {}}, "eos_token_id"),
        (with_text(rms_norm_eps=math.nan), "rms_norm_eps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_architectures_and_bad_values_are_refused(raw: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse_config(raw)


@pytest.mark.parametrize("name", ["kda_layers", "full_attn_layers"])
@pytest.mark.parametrize("value", [5, ["4"], [[4]], [True]])
def test_layer_lists_hold_integers(name: str, value: Any) -> None:
    raw = k3()
    raw["text_config"]["linear_attn_config"][name] = value
    with pytest.raises(ConfigError, match=name):
        parse_config(raw)


def test_layer_lists_must_be_complements() -> None:
    raw = k3()
    raw["text_config"]["linear_attn_config"]["full_attn_layers"] = [4, 8]
    with pytest.raises(ConfigError, match="full_attn_layers"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (with_quantization(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (with_quantization(format="nvfp4-pack-quantized"), "format"),
        (with_quantization(quant_method="mxfp4"), "quant_method"),
        (with_quantization(rotation="hadamard"), "rotation"),
        (with_quantization(config_groups={}), "config_groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_quantization_key_is_honoured_or_refused(raw: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse_config(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [("input_activations", {"num_bits": 8}), ("format", "float-quantized"), ("bias", True)],
)
def test_every_group_key_is_honoured_or_refused(key: str, value: Any) -> None:
    raw = k3()
    group = raw["text_config"]["quantization_config"]["config_groups"]["group_0"]
    group[key] = value
    with pytest.raises(ConfigError, match=key):
        parse_config(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", 8), ("group_size", 16), ("symmetric", False), ("dynamic", True), ("clip", 1)],
)
def test_every_weight_key_is_honoured_or_refused(key: str, value: Any) -> None:
    raw = k3()
    group = raw["text_config"]["quantization_config"]["config_groups"]["group_0"]
    group["weights"][key] = value
    with pytest.raises(ConfigError, match=key):
        parse_config(raw)


@pytest.mark.parametrize("quantized", [True, False])
def test_published_objects_are_read_back(quantized: bool) -> None:
    for config in (parse_config(k3()).text, parse_config(kimi_linear_48b()).text):
        again = parse_config(json.loads(json.dumps(to_published(config, quantized=quantized))))
        assert again.text == config
        assert again.is_wrapped
        assert (again.quantization is not None) is quantized


def test_a_dense_model_is_read_back() -> None:
    config = small_config()
    with pytest.raises(ConfigError, match="moe_layers"):
        to_published(replace(config, moe_layers=(2, 4)))
    dense = replace(config, moe_layers=(), moe=None)
    assert parse_config(to_published(dense)).text == dense


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_config(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        read_config(file)
    file.write_text(json.dumps(k3()))
    read: CheckpointConfig = read_config(tmp_path)
    assert read == read_config(file) == parse_config(k3())
    file.write_text(json.dumps(with_text(mystery=1)))
    with pytest.raises(ConfigError, match=r"config\.json: .*text_config\.mystery"):
        read_config(tmp_path)
