"""What `--speculative-config` accepts, and what it says to everything else."""

import json

import pytest

from moonlet.core.errors import ConfigError
from moonlet.engine.speculative import SpeculativeConfig


def test_ngram_reads_its_keys() -> None:
    text = (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 4, "prompt_lookup_occurrence": "latest", "adaptive": false}'
    )
    assert SpeculativeConfig.from_json(text) == SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=3,
        prompt_lookup_min=2,
        prompt_lookup_max=4,
        prompt_lookup_occurrence="latest",
        adaptive=False,
    )


def test_suffix_reads_its_keys() -> None:
    read = SpeculativeConfig.from_dict(
        {
            "method": "suffix",
            "suffix_decoding_max_tree_depth": 12,
            "suffix_decoding_max_cached_requests": 7,
            "suffix_decoding_max_spec_factor": 2.5,
            "suffix_decoding_min_token_prob": 0.4,
        }
    )
    # drafts are as long as the tree is deep where nothing else is said
    assert read.num_speculative_tokens == 12
    assert read.suffix_decoding_max_cached_requests == 7
    assert read.suffix_decoding_max_spec_factor == 2.5
    assert read.suffix_decoding_min_token_prob == 0.4
    assert read.adaptive


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 4}, (1, 4)),
    ],
)
def test_a_missing_bound_of_the_lookup_is_the_other_one(
    given: dict[str, int], expected: tuple[int, int]
) -> None:
    read = SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens": 1, **given})
    assert (read.prompt_lookup_min, read.prompt_lookup_max) == expected


@pytest.mark.parametrize(
    "method",
    ["mtp", "eagle", "eagle3", "dspark", "dflash", "draft_model", "medusa", "mlp_speculator"],
)
def test_methods_with_a_draft_model_are_refused_by_name(method: str) -> None:
    text = json.dumps({"method": method, "model": "x", "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match=f"'{method}'.* not built yet; use ngram or suffix"):
        SpeculativeConfig.from_json(text)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "method is missing"),
        ({"method": "magic"}, "'magic'; choose ngram or suffix"),
        ({"method": None}, "None; choose"),
        ({"method": ["ngram"]}, "choose ngram"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        (NGRAM | {"num_speculative_token": 1}, "did you mean num_speculative_tokens"),
        (NGRAM | {"xyzzy": 1}, "known keys: method"),
        (NGRAM | {"suffix_decoding_max_tree_depth": 8}, "belongs to method 'suffix'"),
        (SUFFIX | {"prompt_lookup_min": 2}, "belongs to method 'ngram'"),
        (NGRAM | {"num_speculative_tokens": 0}, "between 1 and 64"),
        (NGRAM | {"num_speculative_tokens": 65}, "between 1 and 64"),
        (NGRAM | {"num_speculative_tokens": True}, "must be an integer"),
        (NGRAM | {"num_speculative_tokens": 2.0}, "must be an integer"),
        (NGRAM | {"adaptive": 1}, "want true or false"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_max is 3"),
        (NGRAM | {"prompt_lookup_occurrence": "middle"}, "want earliest or latest"),
        (SUFFIX | {"suffix_decoding_max_tree_depth": 1}, "at least 2"),
        (SUFFIX | {"suffix_decoding_max_tree_depth": 65}, "num_speculative_tokens is 65"),
        (SUFFIX | {"suffix_decoding_max_cached_requests": -1}, "at least 0"),
        (SUFFIX | {"suffix_decoding_max_spec_factor": -0.5}, "spec_factor is -0.5"),
        (SUFFIX | {"suffix_decoding_max_spec_factor": float("inf")}, "spec_factor is inf"),
        (SUFFIX | {"suffix_decoding_min_token_prob": 1.5}, r"\[0, 1\]"),
        (SUFFIX | {"suffix_decoding_min_token_prob": float("nan")}, "prob is nan"),
    ],
)
def test_everything_else_is_an_error_that_names_the_key(
    raw: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict(raw)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", "JSON list")])
def test_text_that_is_no_object(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_json(text)
