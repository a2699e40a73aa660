"""Chained hashes of token prefixes (hybrid-cache.md section 4).

A unit is ``unit_size`` consecutive tokens. The hash of unit i covers everything before it, so one
hash names one prefix: ``H_i = sha256(H_{i-1} | tokens of unit i)`` with 32-bit little-endian
tokens, and ``H_0`` covers the format, the model's fingerprint and the tenant's salt. Media that
overlap a unit are hashed into it with their offset.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MediaSpan", "PrefixChain", "root_hash"]

_FORMAT = b"moonlet prefix 1"


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image in a prompt.

    Attributes:
        start: Position of its first placeholder.
        stop: Position after its last one.
        digest: Hash of the content.
    """

    start: int
    stop: int
    digest: bytes


def root_hash(fingerprint: bytes, salt: str) -> bytes:
    """Hash what every prefix of one tenant and model has in common."""
    parts = (_FORMAT, fingerprint, salt.encode())
    return hashlib.sha256(b"".join(len(p).to_bytes(4, "little") + p for p in parts)).digest()


class PrefixChain:
    """Hashes of all complete units of one growing sequence.

    Args:
        root: From `root_hash`.
        unit_size: Tokens per unit.
        media: Images of the prompt.
    """

    __slots__ = ("_media", "_size", "keys", "root")

    def __init__(self, root: bytes, unit_size: int, media: Sequence[MediaSpan] = ()) -> None:
        self.root = root
        self.keys: list[bytes] = []
        self._size = unit_size
        self._media = tuple(media)

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Hash further complete units.

        Args:
            tokens: Tokens from position ``start`` on.
            start: Where the hashed units end.
        """
        size = self._size
        assert start == len(self.keys) * size, "units are hashed in order"
        previous = self.keys[-1] if self.keys else self.root
        for offset in range(0, len(tokens) - size + 1, size):
            words = array("I", tokens[offset : offset + size])
            content = previous + words.tobytes() + self._extra(start + offset)
            previous = hashlib.sha256(content).digest()
            self.keys.append(previous)

    def _extra(self, start: int) -> bytes:
        """Serialise the media that overlap the unit at ``start``."""
        if not self._media:
            return b""
        inside = [m for m in self._media if m.start < start + self._size and m.stop > start]
        return b"".join(
            (m.start - start).to_bytes(8, "little", signed=True) + m.digest for m in inside
        )
