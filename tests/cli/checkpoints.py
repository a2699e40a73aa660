"""A tiny real checkpoint on disk, and the command as a subprocess."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from moonlet.chat.bpe import tokenizer_files
from moonlet.testing import tiny_config, tiny_model
from moonlet.weights.writer import save_model
from tests.patience import PATIENCE_S

RANKS = {bytes((value,)): value for value in range(256)}


def write_checkpoint(
    directory: Path, *, seed: int = 0, generation_config: dict[str, Any] | None = None
) -> Path:
    """Write the tiny model with a byte vocabulary in the published layout."""
    save_model(
        tiny_model(seed=seed),
        directory,
        tiny_config(),
        tokenizer_files(RANKS),
        {"temperature": 0.0} if generation_config is None else generation_config,
    )
    return directory


def moonlet(
    *arguments: str, stdin: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "moonlet.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(**(env or {})),
    )


def environment(**changes: str) -> dict[str, str]:
    """The environment of a command: one thread, no colour, no terminal of the test's own."""
    fixed = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"}
    return {**os.environ, **fixed, **changes}


@dataclass(slots=True)
class Served:
    """A ``moonlet serve`` process that answers."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """Fetch a path."""
        return httpx2.get(self.url + path, trust_env=False, timeout=PATIENCE_S, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx2.Response:
        """Send JSON."""
        return httpx2.post(
            self.url + path, json=body, trust_env=False, timeout=PATIENCE_S, **options
        )

    def chat(self, text: str = "hi", **fields: Any) -> httpx2.Response:
        """Ask the first model something short."""
        model = self.get("/v1/models").json()["data"][0]["id"]
        messages = [{"role": "user", "content": text}]
        return self.post(
            "/v1/chat/completions",
            {"model": model, "messages": messages, "max_tokens": 8, **fields},
        )

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(signum)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serve(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Served]:
    """Run ``moonlet serve`` on a free port until the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moonlet.cli", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(**(env or {})),
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if line.startswith("try: curl "):
                yield Served(process, line.split()[2].rsplit("/v1/", 1)[0], lines)
                break
        else:
            raise AssertionError("\n".join(lines))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
