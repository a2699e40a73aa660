"""Environment variables: the only place where moonlet reads them.

Every variable starts with ``MOONLET_``; `docs/environment.md` lists them. A value that cannot be
understood is an error, never ignored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from moonlet.core.errors import ConfigError

__all__ = [
    "CPU_ISA_LEVELS",
    "available_cores",
    "bound_threads",
    "cpu_isa_cap",
    "is_debug",
    "restart_with_huge_heap",
]

CPU_ISA_LEVELS = ("scalar", "avx2", "avx512", "vnni")
"""Instruction-set levels of the native kernels, each including the ones before it."""

_HUGE_HEAP = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=4294967296",
        "glibc.malloc.trim_threshold=68719476736",
    )
)
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


def available_cores() -> int:
    """Return how many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bound_threads(num_threads: int | None = None) -> int:
    """Bound the threads of numeric libraries and make them wait without spinning.

    Takes effect only before torch is imported. A busy neighbour then slows a model by its share
    of the processors, not by a factor.

    Args:
        num_threads: Wanted threads; ``OMP_NUM_THREADS``, else the processors given to this
            process, when None.

    Returns:
        The number of threads.

    Raises:
        ConfigError: ``OMP_NUM_THREADS`` is no positive number.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    if num_threads is None and given:
        if not given.isdecimal() or int(given) < 1:
            raise ConfigError(f"OMP_NUM_THREADS is {given!r}; set it to a positive number")
        num_threads = int(given)
    if num_threads is None:
        num_threads = available_cores()
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    return num_threads


def restart_with_huge_heap(command: str) -> None:
    """Start this process anew with a C heap of huge pages that is never handed back.

    Training allocates and frees activations of about a megabyte all the time. With this heap nano
    trains 2 to 5 % faster on an idle 2-core machine (8 turns of 30 s against the usual heap); on a
    host whose other guests were busy, 37 % were seen once (3 turns, the other run 450 steps older).
    Weights that are only read gain nothing, so serving does without. glibc takes the setting at
    its start only. Returns where there is nothing to do: another
    platform, ``GLIBC_TUNABLES`` set already, or a process whose command line is not ``command``.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or sys.argv[1:2] != [command]:
        return
    os.environ["GLIBC_TUNABLES"] = _HUGE_HEAP
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
