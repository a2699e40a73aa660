"""``moonlet serve``: a checkpoint behind the OpenAI API."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from moonlet.cli.models import NANO, load_progress, model_directory, served_names
from moonlet.cli.vllm_flags import VllmFlags
from moonlet.core.env import bound_threads
from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import read_config
from moonlet.core.units import format_count

__all__ = ["serve_command"]

EXIT_INTERRUPTED = 130


def serve_command(
    model: str | None = None,
    /,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(name=["--port", "-p"])] = 8000,
    api_key: Annotated[list[str] | None, Parameter(negative="")] = None,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    served_model_name: Annotated[
        list[str] | None, Parameter(consume_multiple=True, negative="")
    ] = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int | None = None,
    max_queue: int = 256,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    threads: int | None = None,
    effort_fallback: Literal["error", "nearest"] = "error",
    tool_stream: Literal["incremental", "atomic"] = "incremental",
    drain_timeout: int = 30,
    log_level: Literal["debug", "info", "warning", "error"] = "warning",
    vllm: VllmFlags = VllmFlags(),  # noqa: B008
) -> int:
    """Serve a checkpoint over an OpenAI-compatible HTTP API.

    Parameters
    ----------
    model
        Checkpoint directory in the published layout; the bundled moonlet-nano when left out.
    host
        Address to listen on. Anything but a loopback address needs a key.
    port
        Port to listen on; 0 takes a free one.
    api_key
        Key that clients must send; may be given more than once.
    insecure
        Allow other machines in without a key.
    served_model_name
        Names that requests may use as model; replies carry the first.
    max_model_len
        Prompt and output of one request in tokens; the checkpoint's limit when left out.
    max_num_seqs
        Requests computed at the same time.
    max_num_batched_tokens
        Tokens per forward pass: longer prompts are computed in chunks.
    max_queue
        Requests that may wait beyond those computed; more are answered 429.
    dtype
        Of weights and activations; auto is float32.
    threads
        Threads for the model; the processors given to this process when left out.
    effort_fallback
        What an unknown reasoning effort gets: a 400, or the nearest known one.
    tool_stream
        Stream tool arguments as they are written, or each call in one piece.
    drain_timeout
        Seconds that running requests get to finish after a termination signal.
    log_level
        Least severe messages on stderr; info has one line per request.
    """
    console = Console(stderr=True)
    vllm.check()
    directory = model_directory(model)
    max_model_len = _capped_length(max_model_len, directory, console)
    for note in vllm.notes():
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    _set_up(threads, log_level)
    _check_counts(max_queue=max_queue, drain_timeout=drain_timeout)

    # torch starts its threads on import, so nothing above may import it
    from moonlet.serve.app import create_app
    from moonlet.serve.loading import EngineOptions, load_engine
    from moonlet.serve.server import Server, bind, check_exposure
    from moonlet.serve.settings import ServeConfig, hash_key

    check_exposure(host, bool(api_key), insecure)
    names = tuple(served_model_name or served_names(model, directory))
    options = EngineOptions(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype="float32" if dtype == "auto" else dtype,
    )
    with bind(host, port) as bound:
        with load_progress(f"loading {names[0]}", console) as on_progress:
            loaded = load_engine(directory, options, on_progress)
        with loaded.engine as engine:
            config = ServeConfig(
                model_names=names,
                max_model_len=engine.limits.max_model_len,
                model_root=model or NANO,
                api_key_hashes=tuple(hash_key(key) for key in api_key or ()),
                defaults=loaded.defaults,
                max_requests=max_num_seqs + max_queue,
                effort_fallback=effort_fallback,
                tool_stream=tool_stream,
            )
            app = create_app(engine, loaded.tokenizer, config)
            url = _url(bound.getsockname())
            lines = _banner(url, names[0], loaded.num_parameters, bool(api_key), model is None)
            server = Server(
                app,
                drain_timeout_s=drain_timeout,
                on_started=lambda: _show(console, lines),
            )
            was_cut = server.run_until_exit(bound)
    return EXIT_INTERRUPTED if was_cut else 0


def _capped_length(wanted: int | None, directory: Path, console: Console) -> int | None:
    """Return the context to serve; a wish beyond the checkpoint's limit is said and lowered."""
    if wanted is None:
        return None
    limit = read_config(directory).text.max_position_embeddings
    if wanted <= limit:
        return wanted
    console.print(
        f"--max-model-len {wanted}: this checkpoint knows {limit} positions; serving {limit}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return limit


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must not be negative")


def _set_up(threads: int | None, log_level: str) -> None:
    """Bound the model's threads and send log lines to stderr."""
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads is {threads}; it must be at least 1")
    num_threads = bound_threads(threads)
    logging.basicConfig(
        stream=sys.stderr,
        level=log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    # the server's own start and stop lines are said by the banner
    logging.getLogger("uvicorn").setLevel("DEBUG" if log_level == "debug" else "WARNING")

    import torch

    torch.set_num_threads(num_threads)


def _url(address: tuple[str, int]) -> str:
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _banner(
    url: str, name: str, num_parameters: int, has_key: bool, is_bundled: bool
) -> Sequence[str]:
    """Return the lines that tell what runs and how to try it."""
    lines = [f"{name}, {format_count(num_parameters)} parameters, at {url}/v1"]
    if is_bundled:
        lines += [
            "This is the Kimi K3 architecture and protocol at toy size. It adds and subtracts "
            "small numbers, calls a declared tool, greets, and declines the rest.",
            "It is not Kimi K3, knows nothing, and is no assistant: use it to develop and test.",
        ]
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    body = f'{{"model":"{name}","messages":[{{"role":"user","content":"What is 123+456?"}}]}}'
    lines.append(
        f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )
    return lines


def _show(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
