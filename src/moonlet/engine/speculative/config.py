"""What `--speculative-config` says: the method of drafting and its knobs, under vLLM's names.

    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_tree_depth": 24}

A key that the method does not read is an error, as is a method that needs a draft model: those are
refused by name (speculative.md sections 3.5 and 4).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from moonlet.core.errors import ConfigError

__all__ = ["SpeculativeConfig", "unbuilt_method"]

Method = Literal["ngram", "suffix"]
Occurrence = Literal["earliest", "latest"]

MAX_DRAFTS = 64
DEFAULT_LOOKUP = 5
_NOT_BUILT = (
    *("mtp", "eagle", "eagle3", "dspark", "dflash", "draft_model", "medusa", "mlp_speculator"),
    *("deepseek_mtp", "kimi_k3_mtp"),
)
_COMMON = ("method", "num_speculative_tokens", "adaptive")
_KEYS = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max", "prompt_lookup_occurrence"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Drafting without a draft model.

    Attributes:
        method: ``ngram`` looks up the newest ids in the request's own text, ``suffix`` in its text
            and in what finished requests said.
        num_speculative_tokens: Drafts per round at most.
        adaptive: Draft only where measured costs and acceptance promise more tokens per second;
            False always drafts as much as it can.
        prompt_lookup_min: ngram: shortest ending that is looked up.
        prompt_lookup_max: ngram: longest ending that is looked up.
        prompt_lookup_occurrence: ngram: which earlier occurrence is continued.
        suffix_decoding_max_tree_depth: suffix: ids of matched ending and draft together.
        suffix_decoding_max_cached_requests: suffix: finished requests whose output is remembered;
            0 drafts from the request's own text only.
        suffix_decoding_max_spec_factor: suffix: drafts per matched id.
        suffix_decoding_min_token_prob: suffix: a draft ends where its estimated probability falls
            below.
    """

    method: Method
    num_speculative_tokens: int
    adaptive: bool = True
    prompt_lookup_min: int = DEFAULT_LOOKUP
    prompt_lookup_max: int = DEFAULT_LOOKUP
    prompt_lookup_occurrence: Occurrence = "earliest"
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        """Check the method and every range."""
        _check_method(self.method)
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative.adaptive is {self.adaptive!r}; want true or false")
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, None)
        _check_integer("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, None)
        if self.prompt_lookup_occurrence not in ("earliest", "latest"):
            raise ConfigError(
                f"speculative.prompt_lookup_occurrence is {self.prompt_lookup_occurrence!r}; "
                "want earliest or latest"
            )
        depth = self.suffix_decoding_max_tree_depth
        _check_integer("suffix_decoding_max_tree_depth", depth, 2, None)
        cached = self.suffix_decoding_max_cached_requests
        _check_integer("suffix_decoding_max_cached_requests", cached, 0, None)
        factor = self.suffix_decoding_max_spec_factor
        _check_number("suffix_decoding_max_spec_factor", factor, 0.0, float("inf"))
        share = self.suffix_decoding_min_token_prob
        _check_number("suffix_decoding_min_token_prob", share, 0.0, 1.0)

    @staticmethod
    def from_json(text: str) -> SpeculativeConfig:
        """Read the usual JSON object.

        Raises:
            ConfigError: Not an object, an unknown or foreign key, a method that is not built, or a
                value out of range.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the speculative config is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(
                f"the speculative config is a JSON {type(raw).__name__}; want an object like "
                '{"method": "ngram", "num_speculative_tokens": 4}'
            )
        return SpeculativeConfig.from_dict(raw)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> SpeculativeConfig:
        """Check the keys of a decoded object; errors as in `from_json`."""
        if "method" not in raw:
            raise ConfigError(f"speculative.method is missing; choose {' or '.join(_KEYS)}")
        method = raw["method"]
        _check_method(method)
        known = (*_COMMON, *_KEYS[method])
        for key in raw:
            if key not in known:
                _refuse_key(key, method, known)
        values = dict(raw)
        if method == "ngram":
            values |= _lookup_range(raw)
            if "num_speculative_tokens" not in raw:
                raise ConfigError("speculative.num_speculative_tokens is missing; give a number")
        else:
            depth = raw.get("suffix_decoding_max_tree_depth", 24)
            values.setdefault("num_speculative_tokens", depth)
        return SpeculativeConfig(**values)


def unbuilt_method(text: str) -> str | None:
    """Return the method of a JSON config where it is known and needs a draft model, else None."""
    try:
        raw = json.loads(text)
    except ValueError:
        return None
    method = raw.get("method") if isinstance(raw, dict) else None
    return method if method in _NOT_BUILT else None


def _lookup_range(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the bound that is missing with the other one, as vLLM does."""
    low, high = raw.get("prompt_lookup_min"), raw.get("prompt_lookup_max")
    if low is None:
        low = DEFAULT_LOOKUP if high is None else high
    return {"prompt_lookup_min": low, "prompt_lookup_max": low if high is None else high}


def _check_method(method: object) -> None:
    if isinstance(method, str) and method in _KEYS:
        return
    built = " or ".join(_KEYS)
    if method in _NOT_BUILT:
        raise ConfigError(
            f"speculative.method is {method!r}, which needs a draft model and is not built yet; "
            f"use {built}"
        )
    raise ConfigError(f"speculative.method is {method!r}; choose {built}")


def _refuse_key(key: str, method: Method, known: tuple[str, ...]) -> None:
    owner = next((other for other, keys in _KEYS.items() if key in keys), None)
    if owner is not None:
        raise ConfigError(f"speculative.{key} belongs to method {owner!r}, not {method!r}; drop it")
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
    raise ConfigError(f"speculative.{key} is not a key of method {method!r}; {hint}")


def _check_integer(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"speculative.{name} is {value!r}; it must be an integer")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"speculative.{name} is {value}; it must be {wanted}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # a NaN fails both comparisons
    if not is_number or not low <= cast(float, value) <= high or value == float("inf"):
        raise ConfigError(f"speculative.{name} is {value!r}; want a number in [{low:g}, {high:g}]")
