"""Attention Residuals over the depth of the network (model.md section 3.2; report section 2.3).

A `DepthStream` lives for one forward pass. It keeps the finished block sums and the running prefix
sum of every row and gives each sublayer its input. Three streams exist: the plain residual of
Kimi-Linear, and AttnRes in the sequential and the two-phase form, which agree up to rounding.

Letters: T packed rows, D hidden, M sublayers sharing the finished blocks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moonlet.core.errors import ConfigError
from moonlet.kernels.attn_res.reference import BlockFold
from moonlet.kernels.registry import Kernels
from moonlet.model.layers import Linear, RMSNorm

__all__ = ["ATTN_RES_FORMS", "DepthStream", "MixWeights", "mix_modules", "open_stream"]

ATTN_RES_FORMS = ("sequential", "two_phase")


class MixWeights:
    """Norm scale and pseudo-query of one mix; their float32 product is what scores need."""

    def __init__(self, norm: RMSNorm, proj: Linear) -> None:
        self.norm = norm
        self.proj = proj

    @property
    def weight_D(self) -> Tensor:
        """float32 ``norm.weight * proj.weight``."""
        return self.norm.weight.float() * self.proj.weight[0].float()


class DepthStream(Protocol):
    """What flows between sublayers during one forward pass."""

    def read(self) -> Tensor:
        """Input of the next sublayer (before its layer norm), in network order."""
        ...

    def close_block(self) -> None:
        """Finish the running block: called after the attention read of a boundary layer."""
        ...

    def add(self, output_TD: Tensor) -> None:
        """Add a sublayer's output to the running sum."""
        ...


class _Residual:
    """The ordinary residual stream."""

    def __init__(self, embedded_TD: Tensor) -> None:
        self._x = embedded_TD

    def read(self) -> Tensor:
        return self._x

    def close_block(self) -> None:
        return

    def add(self, output_TD: Tensor) -> None:
        self._x = self._x + output_TD


class _Sequential:
    """AttnRes that mixes all sources anew at every sublayer."""

    def __init__(self, embedded_TD: Tensor, mixes: list[MixWeights], kernels: Kernels) -> None:
        self._blocks: list[Tensor] = []
        self._prefix: Tensor | None = embedded_TD
        self._mixes = iter(mixes)
        self._mix = kernels.attn_res_mix

    def read(self) -> Tensor:
        mix = next(self._mixes)
        return self._mix(self._blocks, self._prefix, mix.weight_D, mix.norm.eps)

    def close_block(self) -> None:
        if self._prefix is not None:
            self._blocks.append(self._prefix)
        self._prefix = None

    def add(self, output_TD: Tensor) -> None:
        self._prefix = output_TD if self._prefix is None else self._prefix + output_TD


class _TwoPhase:
    """AttnRes that folds the finished blocks once for all sublayers sharing them."""

    def __init__(
        self,
        embedded_TD: Tensor,
        mixes: list[MixWeights],
        shared_counts: list[int],
        kernels: Kernels,
    ) -> None:
        self._blocks: list[Tensor] = []
        self._prefix: Tensor | None = embedded_TD
        self._mixes = mixes
        self._shared_counts = iter(shared_counts)
        self._position = 0
        self._fold: BlockFold | None = None
        self._fold_start = 0
        self._kernels = kernels

    def read(self) -> Tensor:
        mix = self._mixes[self._position]
        index = self._position - self._fold_start
        self._position += 1
        prefix = self._prefix
        if self._fold is None or prefix is None:
            return prefix if prefix is not None else self._blocks[-1]
        fold = self._fold
        return self._kernels.attn_res_join(
            fold.m_MT[index],
            fold.l_MT[index],
            fold.acc_MTD[index],
            prefix,
            mix.weight_D,
            mix.norm.eps,
        )

    def close_block(self) -> None:
        if self._prefix is not None:
            self._blocks.append(self._prefix)
        self._prefix = None
        count = next(self._shared_counts)
        sharing = self._mixes[self._position : self._position + count]
        self._fold_start = self._position
        weights = torch.stack([mix.weight_D for mix in sharing])
        self._fold = self._kernels.attn_res_fold(self._blocks, weights, sharing[0].norm.eps)

    def add(self, output_TD: Tensor) -> None:
        self._prefix = output_TD if self._prefix is None else self._prefix + output_TD


def open_stream(
    embedded_TD: Tensor,
    mixes: list[MixWeights],
    boundaries: list[int],
    kernels: Kernels,
    form: str,
) -> DepthStream:
    """Start the stream of one forward pass.

    Args:
        embedded_TD: Token embeddings.
        mixes: Weights of every mix in network order (attention, FFN, ..., output); empty for the
            plain residual stream.
        boundaries: Positions in ``mixes`` after whose read the running block closes.
        kernels: Operators.
        form: ``sequential`` or ``two_phase``.

    Raises:
        ConfigError: Another form.
    """
    if not mixes:
        return _Residual(embedded_TD)
    if form == "sequential":
        return _Sequential(embedded_TD, mixes, kernels)
    if form == "two_phase":
        ends = [*boundaries[1:], len(mixes)]
        counts = [end - start for start, end in zip(boundaries, ends, strict=True)]
        return _TwoPhase(embedded_TD, mixes, counts, kernels)
    raise ConfigError(f"attn_res form is {form!r}; choose one of {', '.join(ATTN_RES_FORMS)}")


def mix_modules(
    hidden_size: int,
    eps: float,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> tuple[RMSNorm, Linear]:
    """Return the norm and the ``[1, D]`` pseudo-query of one mix."""
    norm = RMSNorm(hidden_size, eps, kernels, dtype, device)
    return norm, Linear(hidden_size, 1, dtype, device)
