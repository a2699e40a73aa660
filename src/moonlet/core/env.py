"""Environment variables: the only place where moonlet reads them.

Every variable starts with ``MOONLET_``; `docs/environment.md` lists them. A value that cannot be
understood is an error, never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from moonlet.core.errors import ConfigError

__all__ = ["CPU_ISA_LEVELS", "cpu_isa_cap", "is_debug"]

CPU_ISA_LEVELS = ("scalar", "avx2", "avx512", "amx")
"""Instruction-set levels of the native kernels, each including the ones before it."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def cpu_isa_cap(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the highest instruction-set level that native kernels may use.

    Args:
        environ: Variables to read instead of the process environment.

    Returns:
        One of `CPU_ISA_LEVELS`, or None where ``MOONLET_CPU_ISA`` is unset or empty.

    Raises:
        ConfigError: The value is not a level.
    """
    value = (os.environ if environ is None else environ).get("MOONLET_CPU_ISA", "").strip()
    if not value:
        return None
    if value not in CPU_ISA_LEVELS:
        choices = ", ".join(CPU_ISA_LEVELS)
        raise ConfigError(f"MOONLET_CPU_ISA is {value!r}; choose one of {choices}")
    return value


def is_debug(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``MOONLET_DEBUG`` asks for tracebacks of user mistakes.

    Args:
        environ: Variables to read instead of the process environment.

    Raises:
        ConfigError: The value is neither a yes nor a no.
    """
    value = (os.environ if environ is None else environ).get("MOONLET_DEBUG", "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"MOONLET_DEBUG is {value!r}; set it to 1 or 0")
