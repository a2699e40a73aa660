"""What a checkpoint consists of in bytes, and who may read it.

A checkpoint at position e is the MLA rows ``[0, e)`` of all MLA layers and the KDA state after
exactly e tokens, always together (hybrid-cache.md sections 1 and 12). Both leave the arenas in the
layout of `cache.state`: rows token by token, states head by head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError

__all__ = [
    "CacheIdentity",
    "Payload",
    "StateGeometry",
    "break_even_tokens",
    "first_difference",
    "view",
]

Payload = npt.NDArray[np.uint8]
"""Bytes of one object, flat. Whoever is handed one may read it as long as it likes, never write."""

FORMAT_VERSION = 1
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def view(data: Payload | bytes) -> memoryview:
    """Return the bytes of an object without a copy."""
    return memoryview(data) if isinstance(data, bytes) else data.data.cast("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGeometry:
    """Sizes of what the layers keep of one sequence.

    Attributes:
        dtype: Of MLA rows and convolution tails.
        state_dtype: Of recurrent states.
        num_mla_layers: Gated MLA layers.
        row_width: Values of one row: latent and shared key.
        num_kda_layers: KDA layers.
        num_heads: KDA heads.
        head_dim: Key and value width of a KDA head.
        conv_rows: Rows of the convolution tail: taps less one.
    """

    dtype: str
    state_dtype: str = "float32"
    num_mla_layers: int
    row_width: int
    num_kda_layers: int
    num_heads: int
    head_dim: int
    conv_rows: int

    def __post_init__(self) -> None:
        """Check that every part is there: a checkpoint without rows or states is no checkpoint."""
        for name in ("dtype", "state_dtype"):
            if getattr(self, name) not in _ITEM_BYTES:
                choices = ", ".join(_ITEM_BYTES)
                raise ConfigError(
                    f"geometry.{name} is {getattr(self, name)!r}; choose one of {choices}"
                )
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"geometry.{name} is {value}; it must be positive")

    @staticmethod
    def of(config: ModelConfig, dtype: str) -> StateGeometry:
        """Read the sizes from an architecture.

        Args:
            config: Architecture with KDA and MLA layers.
            dtype: Name of the model dtype, e.g. ``bfloat16``.

        Raises:
            ConfigError: The dtype is unknown, or one kind of layer is missing.
        """
        return StateGeometry(
            dtype=dtype,
            num_mla_layers=len(config.mla_layers),
            row_width=config.mla.cache_size,
            num_kda_layers=len(config.kda_layers),
            num_heads=config.kda.num_heads,
            head_dim=config.kda.head_dim,
            conv_rows=config.kda.short_conv_kernel_size - 1,
        )

    @property
    def row_bytes(self) -> int:
        """MLA rows of one token over all layers."""
        return self.num_mla_layers * self.row_width * _ITEM_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """KDA state of one sequence over all layers: recurrent states and convolution tails."""
        recurrent = self.head_dim**2 * _ITEM_BYTES[self.state_dtype]
        tail = 3 * self.head_dim * self.conv_rows * _ITEM_BYTES[self.dtype]
        return self.num_kda_layers * self.num_heads * (recurrent + tail)

    def session_bytes(self, position: int) -> int:
        """Payload of a hand-over at ``position`` (section 13); nothing exists before a token."""
        return position * self.row_bytes + self.state_bytes if position else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """Whose checkpoints these are: only an equal identity may read them.

    Attributes:
        fingerprint: Of the model's weights and configuration, as text.
        hash_unit: Tokens per hash unit, h.
        geometry: Sizes of the state.
    """

    fingerprint: str
    hash_unit: int
    geometry: StateGeometry

    def __post_init__(self) -> None:
        """Check the unit."""
        if self.hash_unit < 1:
            raise ConfigError(f"hash_unit is {self.hash_unit}; it must be positive")

    @property
    def unit_bytes(self) -> int:
        """MLA rows of one hash unit."""
        return self.hash_unit * self.geometry.row_bytes

    def header(self) -> dict[str, Any]:
        """Return what is written beside every checkpoint."""
        return {
            "format": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "hash_unit": self.hash_unit,
            "unit_bytes": self.unit_bytes,
            "state_bytes": self.geometry.state_bytes,
            "geometry": dataclasses.asdict(self.geometry),
        }


def first_difference(own: Mapping[str, Any], other: Any, path: str = "") -> str | None:
    """Name the first field in which another header differs, in words; None where none does."""
    if not isinstance(other, Mapping):
        return f"{path.rstrip('.') or 'header'} is {other!r}, not a table"
    for name, value in own.items():
        theirs = other.get(name)
        if isinstance(value, Mapping):
            difference = first_difference(value, theirs, f"{path}{name}.")
            if difference is not None:
                return difference
        elif theirs != value:
            return f"{path}{name} is {theirs!r}, here it is {value!r}"
    return None


def break_even_tokens(
    geometry: StateGeometry, *, read_bytes_per_s: float, prefill_tps: float
) -> float:
    """Return the length above which reading a checkpoint beats computing it (section 12).

    Reading L tokens moves ``state_bytes + L * row_bytes``, computing them takes ``L /
    prefill_tps``; infinite where rows arrive no faster than they are computed.
    """
    gain_s = 1 / prefill_tps - geometry.row_bytes / read_bytes_per_s
    return geometry.state_bytes / read_bytes_per_s / gain_s if gain_s > 0 else math.inf
