"""What a load run is told, checked once; defaults depend on the workload."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from moonlet.bench.load.lengths import Lengths
from moonlet.core.errors import ConfigError

__all__ = ["LoadSettings", "check_url"]

_PLAIN = {"prompt_len": "128", "output_len": "64", "seed": 0, "ignore_eos": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "random": _PLAIN,
    "shared-prefix": {**_PLAIN, "groups": 4, "prefix_len": 1024},
    "multi-turn": {**_PLAIN, "sessions": 8, "turns": 5},
    "agent": {
        **_PLAIN,
        **{"prompt_len": "256", "output_len": "32", "result_len": "32"},
        **{"sessions": 1, "turns": 300},
    },
    "replay": {"speed": 1.0},
}
_OWN = {name for fields in _DEFAULTS.values() for name in fields}
_OWN |= {"tokenizer", "rate", "concurrency"}
_NUM_REQUESTS = 100


def check_url(url: str) -> None:
    """Check that requests can be sent to a URL at all; the HTTP client fails late and obscurely.

    Raises:
        ConfigError: Not HTTP, no host, or no such port.
    """
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(f"URL is {url}; give an endpoint such as http://127.0.0.1:8000/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What is sent when, and what is asked of the answers.

    None stands for the workload's default; a field that a workload does not use must stay None.

    Attributes:
        workload: What is sent: independent prompts (random, the default); prompts of few groups
            with a common system message (shared-prefix); conversations that send back the whole
            history with the server's own replies (multi-turn); or one conversation of many
            steps, each adding a short tool result (agent).
        replay: Send the requests of this file at their times instead: one JSON object a line,
            {"timestamp": seconds, "body": {...}}.
        speed: How many times faster than recorded a file is replayed; 1 when left out.
        rate: Sessions (for random and shared-prefix, requests) that start per second, at random
            (Poisson) times, whatever the server answers.
        concurrency: Sessions in flight, each started when another one ends; 1 when neither this
            nor a rate is given.
        num_requests: Start no more than so many requests; 100 for random and shared-prefix when
            there is no duration.
        duration: Start no more after so many seconds; what has started is finished.
        prompt_len: Length of every user message: N, uniform:LOW,HIGH or
            lognormal:MEDIAN,SIGMA[,MAX]; 128 when left out, 256 for agent. Counted in words, in
            tokens with a tokenizer, without what the server's template adds.
        output_len: Most tokens of an answer, in the same forms; 64 when left out, 32 for agent.
        groups: Groups of shared-prefix that have a prefix in common; 4 when left out.
        prefix_len: Length of the common prefix in words or tokens; 1024 when left out.
        sessions: Conversations of multi-turn (8 when left out) or agent (1).
        turns: Requests of one conversation of multi-turn (5 when left out) or agent (300).
        result_len: Length of the agent's tool results, as prompt_len; 32 when left out.
        tokenizer: Folder with the served model's vocabulary; lengths of text then count tokens.
        seed: Of texts, lengths and arrival times. The same seed sends the same prompts again,
            which the server may still have in its cache.
        ignore_eos: Ask for answers of full length (a field of vLLM and moonlet).
        extra_body: JSON object whose fields every request carries, replayed ones too.
        retries: How often a request answered 429 is sent again, after its Retry-After.
        timeout: Seconds after which a request counts as failed.
        slo_ttft_ms: A request is good when its first token comes within this time.
        slo_itl_ms: A request is good when the mean time between its tokens is within this.
    """

    workload: Literal["random", "shared-prefix", "multi-turn", "agent"] | None = None
    replay: Path | None = None
    speed: float | None = None
    rate: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    duration: float | None = None
    prompt_len: str | None = None
    output_len: str | None = None
    groups: int | None = None
    prefix_len: int | None = None
    sessions: int | None = None
    turns: int | None = None
    result_len: str | None = None
    tokenizer: Path | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    extra_body: str | None = None
    retries: int = 0
    timeout: float = 600.0
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None

    def resolved(self) -> LoadSettings:
        """Return the settings with the workload's defaults filled in.

        Raises:
            ConfigError: A value is out of range, or has no effect on this workload.
        """
        if self.replay is not None and self.workload is not None:
            raise ConfigError("--workload and --replay both say what is sent; give one of them")
        name = "replay" if self.replay is not None else self.workload or "random"
        defaults = dict(_DEFAULTS[name])
        used = {*defaults, *(() if self.replay else ("tokenizer", "rate", "concurrency"))}
        for field in sorted(_OWN - used):
            if getattr(self, field) is not None:
                raise ConfigError(f"{_flag(field)} has no effect on {name}; leave it out")
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate and --concurrency both say when requests start; give one")
        if self.replay is None:
            defaults["workload"] = name
            if self.rate is None:
                defaults["concurrency"] = 1
            if name in ("random", "shared-prefix") and self.duration is None:
                defaults["num_requests"] = _NUM_REQUESTS
        missing = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        filled = dataclasses.replace(self, **missing)
        filled._check()
        return filled

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Fields that every request carries.

        Raises:
            ConfigError: They are not a JSON object.
        """
        if self.extra_body is None:
            return {}
        try:
            fields = json.loads(self.extra_body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra-body is {self.extra_body}; give a JSON object")
        return fields

    def lengths(self, field: str) -> Lengths:
        """Return the distribution that a field describes.

        Raises:
            ConfigError: It describes none.
        """
        return Lengths.parse(getattr(self, field), _flag(field))

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON value."""
        fields = dataclasses.asdict(self)
        return {k: str(v) if isinstance(v, Path) else v for k, v in fields.items()}

    def _check(self) -> None:
        for field in ("concurrency", "num_requests", "groups", "prefix_len", "sessions", "turns"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(field)} is {value}; it must be at least 1")
        for field in ("speed", "rate", "duration", "timeout", "slo_ttft_ms", "slo_itl_ms"):
            value = getattr(self, field)
            if value is not None and not (value > 0 and isfinite(value)):
                raise ConfigError(f"{_flag(field)} is {value}; it must be above 0")
        if self.retries < 0:
            raise ConfigError(f"--retries is {self.retries}; it must not be negative")
        for field in ("prompt_len", "output_len", "result_len"):
            if getattr(self, field) is not None:
                self.lengths(field)
        _ = self.extra_fields


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
