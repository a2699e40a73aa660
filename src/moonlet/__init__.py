"""The Kimi K3 system as one package: model, checkpoints, chat protocol, serving, training.

Importing this package loads neither torch nor a web framework: the names below are imported when
they are first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {}

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'moonlet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
