"""Attention Residuals over the depth of the network (model.md section 3.2; report section 2.3).

A `DepthStream` lives for one forward pass. It keeps the finished block sums and the running prefix
sum of every row and gives each sublayer its input. Three streams exist: the plain residual of
Kimi-Linear, and AttnRes in the sequential and the two-phase form, which agree up to rounding.

Letters: T packed rows, D hidden, X mixes of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moonlet.core.errors import ConfigError
from moonlet.kernels.attn_res.reference import BlockFold
from moonlet.kernels.registry import Kernels
from moonlet.model.layers import Linear, RMSNorm

__all__ = ["ATTN_RES_FORMS", "DepthStream", "Mixes", "mix_modules", "open_stream"]

ATTN_RES_FORMS = ("sequential", "two_phase")


class Mixes:
    """Norm scales and pseudo-queries of a model's mixes in network order.

    Scores need the float32 products ``norm.weight * proj.weight``. Inference keeps them between
    forward passes; they are made anew where gradients are wanted, while training, and when a
    weight was written in place or moved.

    Args:
        parts: Norm and ``[1, D]`` projection of every mix.
    """

    def __init__(self, parts: Sequence[tuple[RMSNorm, Linear]]) -> None:
        self._parts = tuple(parts)
        self._tables = [module._parameters for part in self._parts for module in part]
        self._kept: Tensor | None = None
        self._kept_for: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def eps(self) -> float:
        """Norm epsilon, the same for all."""
        return self._parts[0][0].eps

    def weights(self) -> Tensor | list[Tensor]:
        """Return the float32 products ``[D]`` of all mixes; one matrix ``[X, D]`` where kept."""
        if torch.is_grad_enabled() or self._parts[0][0].training:
            # one by one: a mix that is never read has no gradient
            return self._products()
        # attributes of modules are found slowly, and this runs in every decode step
        weights = [table["weight"] for table in self._tables]
        if any(w is None or w.is_inference() for w in weights):
            # tensors made in inference mode do not count their changes
            return self._products()
        state = tuple(number for w in weights if w is not None for number in _trace(w))
        if self._kept is None or state != self._kept_for:
            self._kept, self._kept_for = torch.stack(self._products()), state
        return self._kept

    def forget(self) -> None:
        """Drop what is kept: weights that share memory with others change without a trace."""
        self._kept = None

    def _products(self) -> list[Tensor]:
        return [norm.weight.float() * proj.weight[0].float() for norm, proj in self._parts]


def _trace(weight: Tensor) -> tuple[int, int]:
    """What changes with every write to a tensor or exchange of its memory."""
    return weight._version, weight.data_ptr()


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

    def __init__(self, embedded_TD: Tensor, kernels: Kernels) -> None:
        self._x = embedded_TD
        self._add = kernels.add

    def read(self) -> Tensor:
        return self._x

    def close_block(self) -> None:
        return

    def add(self, output_TD: Tensor) -> None:
        self._x = self._add(self._x, output_TD)


class _Sequential:
    """AttnRes that mixes all sources anew at every sublayer."""

    def __init__(self, embedded_TD: Tensor, mixes: Mixes, kernels: Kernels) -> None:
        self._blocks: list[Tensor] = []
        self._prefix: Tensor | None = embedded_TD
        self._weights = iter(mixes.weights())
        self._eps = mixes.eps
        self._kernels = kernels

    def read(self) -> Tensor:
        weight_D = next(self._weights)
        return self._kernels.attn_res_mix(self._blocks, self._prefix, weight_D, self._eps)

    def close_block(self) -> None:
        if self._prefix is not None:
            self._blocks.append(self._prefix)
        self._prefix = None

    def add(self, output_TD: Tensor) -> None:
        prefix = self._prefix
        self._prefix = output_TD if prefix is None else self._kernels.add(prefix, output_TD)


class _TwoPhase:
    """AttnRes that folds the finished blocks once for all sublayers sharing them."""

    def __init__(
        self, embedded_TD: Tensor, mixes: Mixes, boundaries: list[int], kernels: Kernels
    ) -> None:
        self._blocks: list[Tensor] = []
        self._prefix: Tensor | None = embedded_TD
        self._weights = mixes.weights()
        self._eps = mixes.eps
        # the fold made at a boundary serves the sublayers up to and with the next one's read
        self._ends = iter([*boundaries[1:], len(mixes)])
        self._fold: BlockFold | None = None
        self._position = 0
        self._fold_start = 0
        self._kernels = kernels

    def read(self) -> Tensor:
        index = self._position - self._fold_start
        self._position += 1
        prefix = self._prefix
        if self._fold is None or prefix is None:
            return prefix if prefix is not None else self._blocks[-1]
        return self._kernels.attn_res_join(self._fold, index, prefix, self._eps)

    def close_block(self) -> None:
        if self._prefix is not None:
            self._blocks.append(self._prefix)
        self._prefix = None
        self._fold_start = self._position
        shared = self._weights[self._position : next(self._ends)]
        weight_MD = shared if isinstance(shared, Tensor) else torch.stack(shared)
        self._fold = self._kernels.attn_res_fold(self._blocks, weight_MD, self._eps)

    def add(self, output_TD: Tensor) -> None:
        prefix = self._prefix
        self._prefix = output_TD if prefix is None else self._kernels.add(prefix, output_TD)


def open_stream(
    embedded_TD: Tensor, mixes: Mixes, boundaries: list[int], kernels: Kernels, form: str
) -> DepthStream:
    """Start the stream of one forward pass.

    Args:
        embedded_TD: Token embeddings.
        mixes: Every mix in network order (attention, FFN, ..., output); empty for the plain
            residual stream.
        boundaries: Positions in ``mixes`` after whose read the running block closes.
        kernels: Operators.
        form: ``sequential`` or ``two_phase``.

    Raises:
        ConfigError: Another form.
    """
    if not mixes:
        return _Residual(embedded_TD, kernels)
    if form == "sequential":
        return _Sequential(embedded_TD, mixes, kernels)
    if form == "two_phase":
        return _TwoPhase(embedded_TD, mixes, boundaries, kernels)
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
