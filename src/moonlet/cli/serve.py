"""``moonlet serve``: a checkpoint behind the OpenAI API."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moonlet.cli.models import NANO, load_progress, model_directory, served_names
from moonlet.cli.serve_flags import ServeFlags
from moonlet.cli.vllm_flags import VllmFlags
from moonlet.core.env import bound_threads
from moonlet.core.hf_config import read_config
from moonlet.core.units import format_count

if TYPE_CHECKING:
    from moonlet.engine.memory import ExternalOptions
    from moonlet.serve.loading import LoadedEngine
    from moonlet.serve.server import Server

__all__ = ["serve_command"]

EXIT_INTERRUPTED = 130


def serve_command(
    model: str | None = None,
    /,
    *,
    flags: ServeFlags = ServeFlags(),  # noqa: B008
    vllm: VllmFlags = VllmFlags(),  # noqa: B008
) -> int:
    """Serve a checkpoint over an OpenAI-compatible HTTP API.

    Parameters
    ----------
    model
        Checkpoint directory in the published layout; the bundled moonlet-nano when left out.
    """
    console = Console(stderr=True)
    vllm.check()
    flags.check()
    directory = model_directory(model)
    max_model_len = _capped_length(flags.max_model_len, directory, console)
    _show(console, vllm.notes())
    _set_up(flags.threads, flags.log_level)

    # torch starts its threads on import, so nothing above may import it
    from moonlet.engine.limits import DEFAULT_CLASS, parse_classes
    from moonlet.engine.memory import MemoryOptions
    from moonlet.engine.speculative.config import SpeculativeConfig, unbuilt_method
    from moonlet.serve.loading import EngineOptions, load_engine
    from moonlet.serve.server import bind, check_exposure

    check_exposure(flags.host, bool(flags.api_key), flags.insecure)
    names = tuple(flags.served_model_name or served_names(model, directory))
    drafts, classes = flags.speculative_config, flags.priority_classes
    unbuilt = None if drafts is None else unbuilt_method(drafts)
    if unbuilt is not None:
        # a launch line of K3 for vLLM names such a model; the answers are the same without it
        note = f"--speculative-config: not needed, {unbuilt} is not built and changes no answer"
        _show(console, [note])
        drafts = None
    options = EngineOptions(
        max_model_len=max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        dtype="float32" if flags.dtype == "auto" else flags.dtype,
        moe_activation=flags.moe_activation,
        trunk=flags.trunk,
        trunk_activation=flags.trunk_activation,
        speculative=None if drafts is None else SpeculativeConfig.from_json(drafts),
        classes=(DEFAULT_CLASS,) if classes is None else parse_classes(classes),
        memory=MemoryOptions(
            page_size=flags.block_size,
            unit_size=flags.prefix_match_unit,
            num_pages=flags.num_pages,
            num_checkpoints=flags.num_checkpoints,
            prefix_caching=flags.enable_prefix_caching,
            external=_external(flags),
        ),
    )
    with bind(flags.host, flags.port) as bound:
        with load_progress(f"loading {names[0]}", console) as on_progress:
            loaded = load_engine(directory, options, on_progress)
        with loaded.engine:
            lines = _banner(
                _url(bound.getsockname()),
                names[0],
                loaded.num_parameters,
                has_key=bool(flags.api_key),
                is_bundled=model is None,
            )
            server = _server(loaded, names, model or NANO, flags, lambda: _show(console, lines))
            was_cut = server.run_until_exit(bound)
    return EXIT_INTERRUPTED if was_cut else 0


def _external(flags: ServeFlags) -> ExternalOptions | None:
    """Return where prefixes are kept beyond the arenas, None for nowhere."""
    from moonlet.engine.memory import ExternalOptions

    if flags.cache_directory is None and not flags.cache_host_gib:
        return None
    return ExternalOptions(
        host_bytes=int(flags.cache_host_gib * 2**30),
        directory=flags.cache_directory,
        disk_bytes=int(flags.cache_disk_gib * 2**30),
    )


def _server(
    loaded: LoadedEngine,
    names: tuple[str, ...],
    model_root: str,
    flags: ServeFlags,
    on_started: Callable[[], None],
) -> Server:
    """Put the HTTP surface over a loaded engine."""
    from moonlet.serve.app import create_app
    from moonlet.serve.server import Server
    from moonlet.serve.settings import ServeConfig, hash_key

    config = ServeConfig(
        model_names=names,
        max_model_len=loaded.engine.limits.max_model_len,
        model_root=model_root,
        api_key_hashes=tuple(hash_key(key) for key in flags.api_key or ()),
        defaults=loaded.defaults,
        max_requests=flags.max_num_seqs + flags.max_queue,
        effort_fallback=flags.effort_fallback,
        tool_stream=flags.tool_stream,
    )
    app = create_app(loaded.engine, loaded.tokenizer, config)
    return Server(app, drain_timeout_s=flags.drain_timeout, on_started=on_started)


def _capped_length(wanted: int | None, directory: Path, console: Console) -> int | None:
    """Return the context to serve; a wish beyond the checkpoint's limit is said and lowered."""
    if wanted is None:
        return None
    limit = read_config(directory).text.max_position_embeddings
    if wanted <= limit:
        return wanted
    note = f"--max-model-len {wanted}: this checkpoint knows {limit} positions; serving {limit}"
    _show(console, [note])
    return limit


def _set_up(threads: int | None, log_level: str) -> None:
    """Bound the model's threads and send log lines to stderr."""
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
    url: str, name: str, num_parameters: int, *, has_key: bool, is_bundled: bool
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


def _show(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
