"""``moonlet bench serve`` as a test runs it: in this process, with its files read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moonlet.cli.main import run
from tests.bench.load_server import LoadServer

FEW = ("--num-requests", "3")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one command left behind."""

    code: int
    report: dict[str, Any]
    records: list[dict[str, Any]]
    printed: str


Bench = Callable[..., Outcome]


def bench_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Return a function that runs the command against a server."""

    def command(server: LoadServer, *flags: str) -> Outcome:
        report, records = folder / "report.json", folder / "requests.jsonl"
        files = ("--json", str(report), "--requests", str(records))
        code = run(["bench", "serve", server.url, *files, *flags])
        return Outcome(
            code,
            json.loads(report.read_text()),
            [json.loads(line) for line in records.read_text().splitlines()],
            capsys.readouterr().out,
        )

    return command


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command is refused."""
    assert run(["bench", "serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err
