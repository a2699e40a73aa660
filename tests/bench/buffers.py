"""Small probe buffers: tests look at what is reported, not at how fast it was."""

import pytest

from moonlet.bench import memory

COLD_BYTES = 1 << 20


def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a megabyte count as larger than any cache."""
    monkeypatch.setattr(memory, "DEFAULT_COLD_BYTES", COLD_BYTES)
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 0)
