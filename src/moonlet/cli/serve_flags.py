"""Flags of ``moonlet serve`` that take effect; those of vLLM that do not are in `vllm_flags`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from moonlet.core.errors import ConfigError

__all__ = ["ServeFlags", "check_threads"]

MAX_PORT = 65_535


def check_threads(threads: int | None) -> None:
    """Check the number of threads that a command was given.

    Raises:
        ConfigError: It is not positive.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads is {threads}; it must be at least 1")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """What a served checkpoint is reachable as, and how much it may hold.

    Attributes:
        host: Address to listen on. Anything but a loopback address needs a key.
        port: Port to listen on; 0 takes a free one.
        api_key: Key that clients must send; may be given more than once.
        insecure: Allow other machines in without a key.
        served_model_name: Names that requests may use as model; replies carry the first.
        max_model_len: Prompt and output of one request in tokens; the checkpoint's limit when
            left out.
        max_num_seqs: Requests computed at the same time.
        max_num_batched_tokens: Tokens per forward pass: longer prompts are computed in chunks.
        max_queue: Requests that may wait beyond those computed; more are answered 429.
        enable_prefix_caching: Share what prompts have in common instead of computing it again.
        block_size: Latent rows per page, a multiple of --prefix-match-unit.
        prefix_match_unit: Tokens per hash: prefixes are shared at its multiples.
        num_pages: Pages of latent rows; when left out, enough for every sequence at full length,
            twice that with prefix caching, but at most 4 GiB.
        cache_directory: Directory that keeps prefixes over restarts; one server at a time.
        cache_disk_gib: Most GiB that the directory may hold.
        cache_host_gib: GiB of memory for prefixes that no longer fit in pages and checkpoints.
        num_checkpoints: Recurrent states kept for later requests; when left out, what fits in
            2 GiB.
        dtype: Of activations; auto is float32, which reads weights as they are stored.
        moe_activation: Rounding of the routed experts' inputs: none (bf16), MXFP8 groups with
            ceil or floor scales, or int8 groups.
        trunk: Matrices outside the routed experts: as stored, or int8 with a scale per row.
        trunk_activation: Rounding of the inputs of an int8 trunk: none (bf16), or int8 groups.
        priority_classes: JSON list of classes, the most important one first, with budgets, e.g.
            [{"name": "chat", "max_prompt_tokens": 8192}, {"name": "long", "max_seqs": 2}].
        speculative_config: JSON that says how to draft tokens, which the model then verifies in one
            pass; the answers stay the same. Methods: ngram, suffix; those of a draft model are
            said not to be built, and nothing is drafted.
        threads: Threads for the model; the processors given to this process when left out.
        effort_fallback: What an unknown reasoning effort gets: a 400, or the nearest known one.
        tool_stream: Stream tool arguments as they are written, or each call in one piece.
        drain_timeout: Seconds that running requests get to finish after a termination signal.
        log_level: Least severe messages on stderr; info has one line per request.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Parameter(name=["--port", "-p"])] = 8000
    api_key: Annotated[list[str] | None, Parameter(negative="")] = None
    insecure: Annotated[bool, Parameter(negative="")] = False
    served_model_name: Annotated[
        list[str] | None, Parameter(consume_multiple=True, negative="")
    ] = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    max_queue: int = 256
    enable_prefix_caching: bool = True
    block_size: int = 256
    prefix_match_unit: int = 64
    num_pages: int | None = None
    num_checkpoints: int | None = None
    cache_directory: Path | None = None
    cache_disk_gib: float = 16.0
    cache_host_gib: float = 0.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    moe_activation: Literal["bf16", "mxfp8", "mxfp8-floor", "int8"] = "bf16"
    trunk: Literal["stored", "int8"] = "stored"
    trunk_activation: Literal["bf16", "int8"] = "bf16"
    priority_classes: str | None = None
    speculative_config: str | None = None
    threads: int | None = None
    effort_fallback: Literal["error", "nearest"] = "error"
    tool_stream: Literal["incremental", "atomic"] = "incremental"
    drain_timeout: int = 30
    log_level: Literal["debug", "info", "warning", "error"] = "warning"

    def check(self) -> None:
        """Refuse values out of range that nothing below would name.

        Raises:
            ConfigError: A count is negative, there is no thread, the port does not exist, or a key
                is empty.
        """
        for name in ("max_queue", "drain_timeout"):
            if getattr(self, name) < 0:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is {getattr(self, name)}; it must not be negative")
        for name in ("cache_disk_gib", "cache_host_gib"):
            if not 0 <= getattr(self, name) < float("inf"):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is {getattr(self, name)}; it must not be negative")
        check_threads(self.threads)
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"--port is {self.port}; it must lie between 0 and {MAX_PORT}")
        if not all(key.strip() for key in self.api_key or ()):
            raise ConfigError("--api-key is empty; give a key, or leave the flag out")
