"""Byte and count formatting for printed text; code itself carries plain integers."""

from __future__ import annotations

__all__ = ["format_bytes", "format_count"]


def format_bytes(num_bytes: int) -> str:
    """Return a size in decimal units, exact bytes below 1 kB (``1.56 TB``)."""
    return _scaled(num_bytes, ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")), "B")


def format_count(count: int) -> str:
    """Return a count in decimal units (``104.19 B`` for 104,189,614,848)."""
    return _scaled(count, ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")), "").strip()


def _scaled(value: int, steps: tuple[tuple[int, str], ...], unit: str) -> str:
    for size, name in steps:
        if abs(value) >= size:
            return f"{value / size:.2f} {name}"
    return f"{value} {unit}"
