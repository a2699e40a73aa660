"""Frozen dataclasses from nested tables, read strictly.

A key that no field names is an error with the closest match, so a misspelt option cannot be
ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from moonlet.core.errors import ConfigError

__all__ = ["from_table"]

T = TypeVar("T")


def from_table(cls: type[T], table: Mapping[str, Any], path: str) -> T:
    """Build a dataclass from a table, tables inside it becoming the dataclasses of its fields.

    Args:
        cls: A dataclass.
        table: Values by field name, as TOML or JSON gives them.
        path: What the table is called in messages.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type or range.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} is {table!r}; it must be a table")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{path}.{key} is not a known key{hint}")
    for name, entry in fields.items():
        required = (
            entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        )
        if required and name not in table:
            raise ConfigError(f"{path}.{name} is missing")
    values = {key: _convert(hints[key], value, f"{path}.{key}") for key, value in table.items()}
    return cls(**values)


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_table(hint, value, path)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} is {value!r}; it must be a list")
        return tuple(_convert(arguments[0], x, f"{path}[{i}]") for i, x in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is {value!r}; it must be a table")
        return {k: _convert(arguments[1], x, f"{path}.{k}") for k, x in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{path} is {value!r}; it must be of type {hint.__name__}")
    return value
