"""Lists every command and flag; run as a script with ``--write`` to store the list."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from cyclopts import App

from moonlet.cli.main import app

STORED = Path(__file__).with_name("surface.txt")


def command_names() -> list[str]:
    """Names of all top-level commands."""
    return _names(app)


def leaf_names() -> list[str]:
    """Commands that do something, ``bench engine`` for a command in a group."""
    return [path for name in command_names() for path in _leaves(app[name], name)]


def _leaves(command: App, path: str) -> list[str]:
    if command.default_command is not None:
        return [path]
    return [leaf for name in _names(command) for leaf in _leaves(command[name], f"{path} {name}")]


def _names(group: App) -> list[str]:
    return sorted(name for name in group if not name.startswith("-"))


def _flags(command: App, path: str) -> Iterator[str]:
    if command.default_command is None:
        for name in _names(command):
            yield from _flags(command[name], f"{path} {name}")
        return
    for argument in command.assemble_argument_collection():
        names = [name for name in argument.names if name != "*"]
        if not names:
            continue
        hint = getattr(argument.hint, "__name__", None) or str(argument.hint)
        if hasattr(argument.hint, "__args__"):
            hint = str(argument.hint).replace("typing.", "")
        default = argument.field_info.default
        shown = "" if default is argument.field_info.empty else f" = {default!r}"
        yield f"{path} {' '.join(names)}: {hint}{shown}"


def surface() -> str:
    """Return the list, one flag a line."""
    return "".join(f"{line}\n" for name in command_names() for line in _flags(app[name], name))


if __name__ == "__main__" and "--write" in sys.argv:
    STORED.write_text(surface(), encoding="utf-8")
