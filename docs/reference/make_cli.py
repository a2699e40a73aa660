"""Writes ``cli.md`` from the commands themselves; a test compares the two.

Run ``python -m docs.reference.make_cli`` after changing a command.
"""

from __future__ import annotations

import io
from pathlib import Path

from cyclopts import App
from rich.console import Console

from moonlet.cli.main import app

TARGET = Path(__file__).with_name("cli.md")

_HEAD = """# Command line

Made by `docs/reference/make_cli.py`. Results go to stdout, progress and messages to stderr.
Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 3 capacity, 130 interrupted. A known
failure is one line on stderr; `MOONLET_DEBUG=1` shows its traceback.
"""


def page() -> str:
    """Return the page."""
    return _HEAD + "".join(_sections(app, ()))


def _sections(group: App, path: tuple[str, ...]) -> list[str]:
    sections: list[str] = []
    for name in sorted(name for name in group if not name.startswith("-")):
        tokens = (*path, name)
        sections.append(f"\n## moonlet {' '.join(tokens)}\n\n```text\n{_help(tokens)}\n```\n")
        if group[name].default_command is None:
            sections += _sections(group[name], tokens)
    return sections


def _help(tokens: tuple[str, ...]) -> str:
    text = io.StringIO()
    console = Console(file=text, width=98, color_system=None, force_terminal=False)
    app.help_print(list(tokens), console=console)
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
