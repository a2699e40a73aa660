"""Backends that tests add to the registry."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from moonlet.kernels.registry import OPERATORS, Backend

MODULE = "moonlet_test_backend"


def add_backend(monkeypatch: pytest.MonkeyPatch, op: str, call: Callable[..., Any]) -> None:
    """Register ``call`` as the last backend of ``op``, named ``added``."""
    module = ModuleType(MODULE)
    module.call = call  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    added = Backend(name="added", target=f"{MODULE}:call")
    monkeypatch.setitem(OPERATORS, op, (*OPERATORS[op], added))
