"""Random values for tensors of the published layout, reproducible tensor by tensor.

Every tensor has a generator of its own: Philox, a counter-based one, keyed by the seed and the
tensor's published name. Its value does not depend on which tensors were made before, nor on the
size of the pieces. Only raw bits are drawn, whose stream numpy keeps stable.

    matrices                 Normal(0, 1 / sqrt(fan_in))
    embedding                Normal(0, 1)
    packed experts           every 4-bit code alike; scale bytes of two neighbouring powers of two
                             whose mean square gives the same deviation
    norms                    Normal(1, 0.05)
    short convolutions       Uniform(-1/sqrt(taps), 1/sqrt(taps))
    A_log                    Uniform(-1/2, 1/2) with the bounded gate, ln Uniform(1, 16) without
    dt_bias                  inverse softplus of exp(Uniform(ln 1e-3, ln 0.1))
    e_score_correction_bias  Normal(0, 0.01)

With these, every projection of a normalised row has a deviation of about 1, so activations stay
finite whatever the depth. A value is one of 65,536 quantiles, looked up in a table by 16 random
bits: that runs at the speed of a disk and needs no floating-point work per element.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.weights.names import PACKED, PLAIN
from moonlet.weights.shapes import TensorSpec

__all__ = ["Rule", "random_bytes", "rule_for"]

Array = NDArray[Any]

NORM_STD = 0.05
POSITION_STD = 0.02
CORRECTION_STD = 0.01
A_LOG_BOUND = 0.5
A_LOG_RANGE = (1.0, 16.0)
DT_RANGE = (1e-3, 0.1)

_NUM_QUANTILES = 1 << 16
# mean square of the 16 E2M1 values
_CODE_MEAN_SQUARE = 8.5625
_SCALE_BIAS = 127
_DRAW_BYTES = 8
# elements per piece: table, random bits and result stay in a second-level cache
_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Rule:
    """How the elements of one tensor are drawn.

    Attributes:
        kind: ``normal``, ``uniform``, ``log_uniform`` or ``dt_bias``; ``codes`` for bytes of two
            4-bit floats, ``scales`` for E8M0 bytes.
        mean: Of ``normal``.
        scale: Standard deviation of ``normal`` and, for ``scales``, of the dequantised matrix;
            half-width of ``uniform``.
    """

    kind: str
    scale: float = 0.0
    mean: float = 0.0


def rule_for(spec: TensorSpec, part: str, config: ModelConfig) -> Rule:
    """Return the rule of one published tensor.

    Args:
        spec: The parameter it fills, or a vision tensor.
        part: ``plain``, ``packed`` or ``scale``.
        config: The text model.
    """
    owner, _, leaf = spec.parameter.rpartition(".")
    name = leaf if leaf != "weight" else owner.rpartition(".")[2]
    fan_in = math.prod(spec.shape[1:])
    if part != PLAIN:
        return Rule("codes") if part == PACKED else Rule("scales", 1 / math.sqrt(fan_in))
    if name == "A_log":
        is_bounded = config.kda.gate_lower_bound is not None
        return Rule("uniform", A_LOG_BOUND) if is_bounded else Rule("log_uniform")
    if name == "dt_bias":
        return Rule("dt_bias")
    if name == "e_score_correction_bias":
        return Rule("normal", CORRECTION_STD)
    if len(spec.shape) == 1:
        return Rule("normal", NORM_STD, 1.0)
    if name.endswith("_conv1d"):
        return Rule("uniform", 1 / math.sqrt(fan_in))
    if name == "embed_tokens":
        return Rule("normal", 1.0)
    if name == "pos_emb":
        return Rule("normal", POSITION_STD)
    return Rule("normal", 1 / math.sqrt(fan_in))


def random_bytes(
    seed: int, name: str, rule: Rule, dtype: str, count: int, piece: int = _PIECE
) -> Iterator[memoryview]:
    """Yield the bytes of one tensor in pieces, the same for the same seed and name.

    Args:
        seed: Any integer.
        name: Published name.
        rule: What to draw.
        dtype: safetensors dtype: ``BF16``, ``F16``, ``F32``, or ``U8`` for packed experts.
        count: Elements.
        piece: Elements per piece, a multiple of 8; has no influence on the bytes.

    Raises:
        ConfigError: No values are drawn in that dtype.
    """
    generator = np.random.Philox(key=_key(seed, name))
    # bits that choose one element: its byte, or the number of its quantile
    draw = np.dtype("u1" if dtype == "U8" else "<u2")
    table = None if rule.kind == "codes" else _table(rule, dtype)
    for start in range(0, count, piece):
        length = min(piece, count - start)
        raw = generator.random_raw(-(-length * draw.itemsize // _DRAW_BYTES))
        drawn = raw.astype("<u8", copy=False).view(draw)[:length]
        # the mode spares a bounds check: no index of this width lies outside
        values = drawn if table is None else table.take(drawn, mode="clip")
        yield values.data.cast("B")


def _key(seed: int, name: str) -> Array:
    digest = hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=16, person=b"moonlet.synth")
    return np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64)


@lru_cache(maxsize=64)
def _table(rule: Rule, dtype: str) -> Array:
    """Elements as stored, by their random bits."""
    if rule.kind == "scales":
        return _scale_codes(rule.scale)
    values = _quantiles(rule)
    if dtype == "F16":
        return values.astype("<f2")
    bits = values.astype("<f4").view("<u4")
    if dtype == "F32":
        return bits
    if dtype == "BF16":
        # to nearest, ties to even
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    raise ConfigError(f"no random values are made in dtype {dtype}")


def _quantiles(rule: Rule) -> Array:
    middles = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    if rule.kind == "normal":
        return rule.mean + rule.scale * _standard_normal()
    if rule.kind == "uniform":
        return rule.scale * (2 * middles - 1)
    if rule.kind == "log_uniform":
        low, high = A_LOG_RANGE
        return np.log(low + (high - low) * middles)
    low, high = map(math.log, DT_RANGE)
    step = np.exp(low + (high - low) * middles)
    return step + np.log(-np.expm1(-step))


@lru_cache(maxsize=1)
def _standard_normal() -> Array:
    normal = NormalDist()
    points = ((i + 0.5) / _NUM_QUANTILES for i in range(_NUM_QUANTILES))
    return np.fromiter(map(normal.inv_cdf, points), dtype=np.float64, count=_NUM_QUANTILES)


def _scale_codes(std: float) -> Array:
    """E8M0 bytes by 8 random bits, so that random codes get the wanted deviation.

    Two neighbouring exponents are mixed, because one alone could be off by a factor of 1.4.
    """
    mean_square = std**2 / _CODE_MEAN_SQUARE
    exponent = math.floor(math.log2(mean_square) / 2)
    share = (mean_square / 4.0**exponent - 1) / 3
    codes = np.full(256, _SCALE_BIAS + exponent, dtype=np.uint8)
    codes[256 - round(256 * share) :] += 1
    return codes
