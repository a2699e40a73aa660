"""Architectures by name: shapes cut from Kimi K3 for measuring, and tables of one's own.

A scale is a TOML file with the ``[model]`` table of a recipe; other tables are not read.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.core.tables import from_table

__all__ = ["load_scale", "read_model_table", "scale_names"]

_FOLDER = resources.files("moonlet.weights").joinpath("scales")
_SUFFIX = ".toml"


def scale_names() -> list[str]:
    """Return the names that `load_scale` knows, sorted."""
    return sorted(
        entry.name.removesuffix(_SUFFIX)
        for entry in _FOLDER.iterdir()
        if entry.name.endswith(_SUFFIX)
    )


def load_scale(name: str) -> ModelConfig:
    """Return the architecture of a shipped scale.

    Raises:
        ConfigError: No scale has that name.
    """
    names = scale_names()
    if name not in names:
        raise ConfigError(f"scale {name!r} does not exist; choose one of {', '.join(names)}")
    text = _FOLDER.joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    return _model(text, f"scale {name}")


def read_model_table(path: str | Path) -> ModelConfig:
    """Read the ``[model]`` table of a TOML file, a recipe for example.

    Raises:
        ConfigError: The file is unreadable or not TOML, has no such table, or the table has a
            wrong key or value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    return _model(text, str(path))


def _model(text: str, where: str) -> ModelConfig:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    if "model" not in tables:
        raise ConfigError(f"{where} has no [model] table; give the architecture there")
    return from_table(ModelConfig, tables["model"], f"{where}: model")
