"""``moonlet chat``: a conversation in the terminal, or one answer in a pipe.

One code path: a client of an OpenAI-compatible endpoint. Without ``--base-url`` the endpoint is
a private server inside this process, on a loopback port with a random key.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from moonlet.cli.models import load_progress, model_directory
from moonlet.cli.openai_client import ChatClient, ChatOptions
from moonlet.cli.serve_flags import check_threads
from moonlet.core.env import bound_threads
from moonlet.core.errors import ConfigError, MoonletError

__all__ = ["chat_command"]

_LEAVE = ("/exit", "/quit")


def chat_command(
    model: str | None = None,
    /,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    model_name: str | None = None,
    effort: Literal["low", "high", "max", "none"] | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    threads: int | None = None,
) -> int:
    """Chat in the terminal, with a checkpoint or an OpenAI-compatible endpoint.

    Reasoning is shown dimmed. In a pipe only the answer is printed.

    Parameters
    ----------
    model
        Checkpoint directory; the bundled moonlet-nano when left out.
    base_url
        Endpoint to use instead, such as http://127.0.0.1:8000/v1.
    api_key
        Key of the endpoint.
    model_name
        Model to ask for; the endpoint's first one when left out.
    effort
        How much to think; the endpoint's default when left out.
    system
        System message before the conversation.
    max_tokens
        Longest answer, reasoning included.
    temperature
        0 always takes the likeliest token; the endpoint's default when left out.
    threads
        Threads for a model in this process.
    """
    if base_url is not None and model is not None:
        raise ConfigError("give a checkpoint or --base-url, not both")
    options = ChatOptions(
        effort=effort, system=system, max_tokens=max_tokens, temperature=temperature
    )
    if base_url is not None:
        with ChatClient(base_url, api_key, model_name, options) as client:
            return _converse(client)
    with (
        _private_server(model, threads) as (url, key),
        ChatClient(url, key, model_name, options) as client,
    ):
        return _converse(client)


@contextmanager
def _private_server(model: str | None, threads: int | None) -> Generator[tuple[str, str]]:
    """Serve a checkpoint to this process only; yield its URL and key."""
    check_threads(threads)
    directory = model_directory(model)
    num_threads = bound_threads(threads)

    import torch

    from moonlet.serve.app import create_app
    from moonlet.serve.loading import EngineOptions, load_engine
    from moonlet.serve.server import Server, bind
    from moonlet.serve.settings import ServeConfig, hash_key

    torch.set_num_threads(num_threads)
    key = secrets.token_hex(16)
    name = directory.resolve().name
    with load_progress(f"loading {name}", Console(stderr=True)) as on_progress:
        loaded = load_engine(directory, EngineOptions(max_num_seqs=1), on_progress)
    with loaded.engine as engine, bind("127.0.0.1", 0) as bound:
        config = ServeConfig(
            model_names=(name,),
            max_model_len=engine.limits.max_model_len,
            api_key_hashes=(hash_key(key),),
            defaults=loaded.defaults,
        )
        is_up = threading.Event()
        app = create_app(engine, loaded.tokenizer, config)
        server = Server(app, drain_timeout_s=1, on_started=is_up.set)
        thread = threading.Thread(target=server.run_until_exit, args=(bound,), daemon=True)
        thread.start()
        is_up.wait()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1", key
        finally:
            server.should_exit = True
            thread.join()


@dataclass(slots=True)
class _Screen:
    """Writes an answer as it comes: plain in a pipe, with dimmed reasoning on a terminal."""

    console: Console
    is_thinking: bool = False

    def reasoning(self, text: str) -> None:
        """Show reasoning, on a terminal only."""
        if self.console.is_terminal:
            self.is_thinking = True
            self.console.print(Text(text, style="dim"), end="", soft_wrap=True)

    def content(self, text: str) -> None:
        """Show a piece of the answer."""
        if self.is_thinking:
            self.is_thinking = False
            self.console.print("\n")
        self.console.file.write(text)
        self.console.file.flush()

    def note(self, text: str) -> None:
        """Show what is neither reasoning nor answer, on a terminal only."""
        if self.console.is_terminal:
            self.console.print(Text(text, style="dim"), soft_wrap=True)

    def end(self) -> None:
        """Finish the line."""
        self.is_thinking = False
        self.console.file.write("\n")
        self.console.file.flush()


def _converse(client: ChatClient) -> int:
    """Answer the whole of stdin, or hold a conversation where stdin is a terminal."""
    screen = _Screen(Console(highlight=False))
    if not sys.stdin.isatty():
        question = sys.stdin.read().strip()
        if not question:
            raise ConfigError("nothing to answer on stdin; write a question into the pipe")
        _answer(client, question, screen)
        return 0
    screen.note(f"{client.model} - /exit or Ctrl-D leaves, Ctrl-C stops an answer")
    with suppress(ImportError):
        # gives input() its line editing, where the platform has it
        import readline  # noqa: F401
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            screen.end()
            return 0
        if question in _LEAVE:
            return 0
        if question:
            _ask(client, question, screen)


def _ask(client: ChatClient, question: str, screen: _Screen) -> None:
    """Answer one turn of a conversation; a failed or stopped one leaves it as it was."""
    try:
        _answer(client, question, screen)
    except KeyboardInterrupt:
        screen.end()
        screen.note("stopped")
    except MoonletError as error:
        sys.stderr.write(f"moonlet: {error}\n")


def _answer(client: ChatClient, question: str, screen: _Screen) -> None:
    finish: Any = None
    for delta in client.ask(question):
        if delta.reasoning:
            screen.reasoning(delta.reasoning)
        if delta.content:
            screen.content(delta.content)
        finish = delta.finish_reason or finish
    screen.end()
    if finish == "length":
        screen.note("the answer was cut by the token limit")
