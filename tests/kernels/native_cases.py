"""What the tests of native inference operators share: bits, the KDA equations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moonlet.kernels import _native
from moonlet.kernels.ragged import Ragged

needs_native = pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors are equal, NaN and the sign of zero included."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@dataclass(frozen=True)
class KDACase:
    """Inputs of one KDA call in the operator's order, the states before it, the borders."""

    inputs: list[Tensor]
    bound: float | None
    state: Tensor
    ragged: Ragged

    def rows(self, first: int, last: int) -> list[Tensor]:
        """The inputs of some packed rows."""
        return [x[first:last] for x in self.inputs[:5]] + self.inputs[5:]


def kda_case(
    lens: Sequence[int],
    bound: float | None,
    heads: int = 2,
    key: int = 32,
    value: int = 48,
    seed: int = 0,
) -> KDACase:
    """Normal inputs with gates over their whole range."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = sum(lens)
    inputs = [
        normal(rows, heads, key),
        normal(rows, heads, key),
        normal(rows, heads, value),
        normal(rows, heads, key) * 3,
        normal(rows, heads),
        normal(heads) * 0.5,
        normal(heads, key),
    ]
    return KDACase(inputs, bound, normal(len(lens), heads, key, value), Ragged.build(list(lens)))


def gate_logit(log_decay: float, bound: float | None) -> float:
    """The z that gives this log decay where A_log and dt_bias are zero."""
    if bound is None:
        return math.log(math.expm1(-log_decay))
    share = log_decay / bound
    return math.log(share / (1 - share))


def recurrence64(case: KDACase) -> tuple[Tensor, Tensor]:
    """The equations in float64: outputs ``[T, H, V]`` and the state after every row."""
    q, k, v, z, beta, a_log, dt_bias = (x.double() for x in case.inputs)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    scale, logits = a_log.exp()[:, None], z + dt_bias
    if case.bound is None:
        alpha = (-scale * F.softplus(logits)).exp()
    else:
        alpha = (case.bound * torch.sigmoid(scale * logits)).exp()
    outputs, states = [], []
    starts = case.ragged.starts_S.tolist()
    for s, (start, length) in enumerate(zip(starts, case.ragged.seq_lens, strict=True)):
        state = case.state[s].double()
        for t in range(start, start + length):
            state = state * alpha[t, :, :, None]
            delta = torch.sigmoid(beta[t])[:, None] * (v[t] - (state * k[t, :, :, None]).sum(1))
            state = state + k[t, :, :, None] * delta[:, None]
            outputs.append((state * q[t, :, :, None]).sum(1))
            states.append(state)
    return torch.stack(outputs), torch.stack(states)


def error(seen: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    assert seen.shape == expected.shape
    scale = float(expected.abs().max()) + 1e-30
    return float((seen.double() - expected.double()).abs().max()) / scale
