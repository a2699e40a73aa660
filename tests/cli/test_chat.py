"""``moonlet chat``: pipes print the answer only, terminals show dimmed reasoning."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moonlet.cli.main import run
from tests.cli.checkpoints import environment, moonlet, serve, write_checkpoint
from tests.patience import PATIENCE_S
from tests.serve.running import answer, prompt_text, serving

DIM, RESET = "\x1b[2m", "\x1b[0m"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-k3")


def _script(prompt: Any) -> list[int]:
    text = prompt_text(prompt)
    effort = text.split("`thinking_effort=")[1].split("`")[0]
    # how many turns the model sees with their earlier reasoning
    num_remembered = text.count("deep thought")
    return answer("deep thought", f"answer {num_remembered} at {effort}: ok [b]")


def test_a_pipe_gets_the_answer_and_nothing_else() -> None:
    with serving(_script) as running:
        url = f"{running.url}/v1"
        result = moonlet("chat", "--base-url", url, stdin="hi\n")
        assert (result.returncode, result.stdout, result.stderr) == (
            0,
            "answer 0 at max: ok [b]\n",
            "",
        )
        low = moonlet("chat", "--base-url", url, "--effort", "low", "--system", "s", stdin="hi")
        assert low.stdout == "answer 0 at low: ok [b]\n"
        named = moonlet("chat", "--base-url", url, "--model-name", "other", stdin="hi")
        assert named.returncode == 2
        assert named.stdout == ""
        assert named.stderr.startswith("moonlet: ")
        assert len(named.stderr.splitlines()) == 1
        assert "no model 'other'" in named.stderr


def test_keys_limits_and_bad_endpoints() -> None:
    from moonlet.serve.settings import hash_key

    with serving(_script, api_key_hashes=(hash_key("k"),)) as running:
        url = f"{running.url}/v1"
        assert moonlet("chat", "--base-url", url, stdin="hi").returncode == 2
        flags = ("--api-key", "k", "--max-tokens", "16", "--temperature", "0")
        cut = moonlet("chat", "--base-url", url, *flags, stdin="hi")
        # 12 characters of reasoning and its tags leave nothing for an answer
        assert (cut.returncode, cut.stdout) == (0, "\n")
    gone = moonlet("chat", "--base-url", url, stdin="hi")
    assert gone.returncode == 2
    assert len(gone.stderr.splitlines()) == 1
    assert moonlet("chat", "--base-url", url, "some/model", stdin="hi").returncode == 2
    assert moonlet("chat", "--base-url", "nonsense", stdin="hi").returncode == 2


def test_a_checkpoint_answers_in_this_process_as_a_server_does(checkpoint: Path) -> None:
    flags = ("--effort", "none", "--max-tokens", "12", "--threads", "1")
    result = moonlet("chat", str(checkpoint), *flags, stdin="What is 1+1?")
    assert result.returncode == 0, result.stderr
    with serve(str(checkpoint)) as served:
        reply = served.chat("What is 1+1?", reasoning_effort="none", max_tokens=12)
    assert result.stdout == reply.json()["choices"][0]["message"]["content"] + "\n"
    assert len(result.stdout) > 1


def test_no_threads_are_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", str(checkpoint), "--threads", "0"]) == 2
    assert capsys.readouterr().err.startswith("moonlet: --threads is 0")


def test_an_empty_pipe_is_refused() -> None:
    with serving(_script) as running:
        result = moonlet("chat", "--base-url", f"{running.url}/v1", stdin=" \n")
    assert result.returncode == 2
    assert "stdin" in result.stderr


class _Terminal:
    """A command whose stdin and stdout are a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        env = {**environment(TERM="xterm-256color"), "NO_COLOR": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonlet.cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, mark: str) -> str:
        text = ""
        while mark not in text:
            assert select.select([self._master], [], [], PATIENCE_S)[0], f"no {mark!r} in {text!r}"
            text += os.read(self._master, 4096).decode("utf-8", "replace")
        return text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_a_terminal_conversation_dims_reasoning_and_keeps_it() -> None:
    with serving(_script) as running:
        terminal = _Terminal("chat", "--base-url", f"{running.url}/v1")
        try:
            terminal.read_until("> ")
            terminal.type("hi\n")
            shown = terminal.read_until("ok [b]")
            reasoning = shown[shown.index("hi") :].split("answer 0")[0]
            assert DIM in reasoning
            plain = reasoning.replace(DIM, "").replace(RESET, "").replace("\r", "")
            assert "deep thought" in plain
            assert DIM not in shown.split("answer 0")[1]
            terminal.read_until("> ")
            terminal.type("again\n")
            # the reasoning of the first turn went back to the model
            terminal.read_until("answer 1")
            terminal.read_until("> ")
            terminal.type("/exit\n")
            assert terminal.process.wait(PATIENCE_S) == 0
        finally:
            terminal.close()
