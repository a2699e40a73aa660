"""What a server needs to know beside its engine: names, keys, limits, defaults.

Every setting is fixed when the server is built; nothing here reads files or the environment
except `read_generation_defaults`, which reads the checkpoint's ``generation_config.json``.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moonlet.chat.call_ids import CallIdStyle
from moonlet.chat.events import ToolStream
from moonlet.core.errors import CheckpointError, ConfigError

__all__ = ["GenerationDefaults", "ServeConfig", "hash_key", "read_generation_defaults"]

MAX_OUTPUT_TOKENS = 131_072
"""Output limit of a request that names none (chat-protocol.md section 6.2)."""


def hash_key(key: str) -> bytes:
    """Return the digest that stands for an API key at rest (SHA-256)."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling of a request that does not say otherwise.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus mass, (0, 1].
        top_k: Candidates kept; 0 keeps all.
        repetition_penalty: 1 does nothing.
        eos_token_ids: Stop ids the file names beside those of ``config.json``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of one HTTP server.

    Attributes:
        model_names: Names that requests may use; replies carry the first.
        max_model_len: Longest prompt plus output in tokens.
        model_root: Where the checkpoint came from, shown by ``/v1/models``.
        api_key_hashes: Digests of accepted keys (`hash_key`); empty leaves the server open.
        defaults: Sampling where a request is silent.
        max_requests: Requests being answered or waiting at once; one more is answered 429.
        retry_after_s: What a 429 or 503 tells the client to wait, seconds.
        max_body_bytes: Largest request body.
        body_timeout_s: How long a body may take to arrive.
        effort_fallback: ``nearest`` maps unknown efforts (minimal, medium, xhigh) to a known one,
            ``error`` refuses them.
        tool_stream: How tool arguments stream.
        tool_call_ids: Spelling of tool-call ids.
        created: Start time, seconds since the epoch.
    """

    model_names: tuple[str, ...]
    max_model_len: int
    model_root: str | None = None
    api_key_hashes: tuple[bytes, ...] = ()
    defaults: GenerationDefaults = GenerationDefaults()
    max_requests: int = 256
    retry_after_s: int = 1
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    effort_fallback: Literal["error", "nearest"] = "error"
    tool_stream: ToolStream = "incremental"
    tool_call_ids: CallIdStyle = "underscore"
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served model names are missing or empty; give at least one")
        for name in ("max_model_len", "max_requests", "retry_after_s", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def model_name(self) -> str:
        """The name that replies carry."""
        return self.model_names[0]


def read_generation_defaults(directory: str | Path) -> GenerationDefaults:
    """Read a checkpoint's ``generation_config.json``; absent fields keep their defaults.

    ``do_sample: false`` means greedy, as where the file comes from.

    Raises:
        CheckpointError: The file is not a JSON object or a field is out of range.
    """
    file = Path(directory) / "generation_config.json"
    if not file.is_file():
        return GenerationDefaults()
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds a {type(raw).__name__}; a JSON object is needed")
    eos = raw.get("eos_token_id")
    greedy = raw.get("do_sample") is False
    return GenerationDefaults(
        temperature=0.0 if greedy else _number(file, raw, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(file, raw, "top_p", 1.0, 0.0, 1.0) or 1.0,
        top_k=max(0, int(_number(file, raw, "top_k", 0, -1, float("inf")))),
        repetition_penalty=_number(file, raw, "repetition_penalty", 1.0, 1e-3, 10.0),
        eos_token_ids=tuple(_ids(file, eos)),
    )


def _number(
    file: Path, raw: dict[str, Any], name: str, default: float, low: float, high: float
) -> float:
    value = raw.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise CheckpointError(f"{file}: {name} is {value!r}; want a number in [{low}, {high}]")
    return value


def _ids(file: Path, eos: object) -> list[int]:
    values: list[object] = [] if eos is None else eos if isinstance(eos, list) else [eos]
    ids = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(ids) != len(values):
        raise CheckpointError(f"{file}: eos_token_id is {eos!r}; want an id or a list of ids")
    return ids
