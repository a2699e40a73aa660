"""Quantile Balancing: the router bias from quantiles of the scores (training.md section 3).

With scores s [m, E], bias b and the cut c_i = (k+1)-th largest of (s_i + b), the bias that
would have given every expert its share q = m k / E is

    b_hat_j = -((q+1)-th largest over i of (s_ij - c_i)),      b <- b_hat - mean(b_hat)

which is the q/m-quantile of the required bias r_ij = c_i - s_ij. The histogram form counts r in
equal bins, so that processes and micro-batches add up before the quantile is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moonlet.core.errors import ConfigError

if TYPE_CHECKING:
    from moonlet.train.muon import SumReducer

__all__ = [
    "BalanceReport",
    "QuantileBalancer",
    "exact_bias",
    "histogram_bias",
    "histogram_counts",
    "histogram_range",
]

NUM_BINS = 1000


def exact_bias(scores_TE: Tensor, bias_E: Tensor, num_experts_per_token: int) -> Tensor:
    """Return the balanced bias of one batch, exactly.

    Args:
        scores_TE: Router scores, float32, without bias.
        bias_E: Bias that routed the batch.
        num_experts_per_token: k, below E.

    Returns:
        The next bias, mean-centred.

    Raises:
        ConfigError: Every expert is chosen for every token, so there is no cut.
    """
    num_tokens, num_experts = scores_TE.shape
    _check_experts(num_experts, num_experts_per_token)
    biased_TE = scores_TE + bias_E
    cut_T = biased_TE.topk(num_experts_per_token + 1, dim=-1).values[:, -1]
    share = num_tokens * num_experts_per_token // num_experts
    margin_TE = scores_TE - cut_T[:, None]
    needed_E = -margin_TE.topk(share + 1, dim=0).values[-1]
    return needed_E - needed_E.mean()


def histogram_range(bias_E: Tensor, num_bins: int = NUM_BINS) -> tuple[float, float]:
    """Return lower edge and bin width of the histogram for a step routed with ``bias_E``."""
    low = float(bias_E.min()) - 1.0
    width = (float(bias_E.max()) - float(bias_E.min()) + 2.0) / num_bins
    return low, width


def histogram_counts(
    scores_TE: Tensor, cut_T: Tensor, low: float, width: float, num_bins: int = NUM_BINS
) -> Tensor:
    """Count the required biases ``cut - score`` of every expert.

    Returns:
        int64 counts [E, num_bins].
    """
    num_experts = scores_TE.shape[1]
    required_TE = cut_T[:, None] - scores_TE
    bins_TE = ((required_TE - low) / width).floor_().to(torch.int64).clamp_(0, num_bins - 1)
    bins_TE += torch.arange(num_experts) * num_bins
    counts = torch.bincount(bins_TE.flatten(), minlength=num_experts * num_bins)
    return counts.view(num_experts, num_bins)


def histogram_bias(
    counts_EN: Tensor, low: float, width: float, num_tokens: int, num_experts_per_token: int
) -> Tensor:
    """Return the balanced bias from accumulated counts, interpolated inside a bin.

    Args:
        counts_EN: int64 counts of the whole step, over all processes.
        low: Lower edge of the first bin.
        width: Bin width.
        num_tokens: Tokens counted.
        num_experts_per_token: k.

    Returns:
        Bias [E], float32, not centred.
    """
    num_experts, num_bins = counts_EN.shape
    share = num_tokens * num_experts_per_token / num_experts
    cumulative_EN = counts_EN.cumsum(dim=1)
    reached_E = (cumulative_EN < math.ceil(share)).sum(dim=1).clamp_(max=num_bins - 1)
    inside_E = counts_EN.gather(1, reached_E[:, None])[:, 0].to(torch.float64)
    before_E = cumulative_EN.gather(1, reached_E[:, None])[:, 0].to(torch.float64) - inside_E
    part_E = ((share - before_E) / inside_E.clamp_min(1.0)).clamp_(0.0, 1.0)
    return (low + (reached_E.to(torch.float64) + part_E) * width).to(torch.float32)


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """Balance of one step, the worst layer of each measure.

    Attributes:
        max_overload: Largest load over mean load, minus one.
        dead_fraction: Share of experts that got no token.
        bias_spread: Largest minus smallest bias.
    """

    max_overload: float
    dead_fraction: float
    bias_spread: float


class _Layer:
    """Counts and bias of one router."""

    def __init__(self, router: Any, num_experts_per_token: int, num_bins: int) -> None:
        self.router = router
        self.top_k = num_experts_per_token
        self.num_bins = num_bins
        self.bias_E: Tensor = router.e_score_correction_bias
        num_experts = self.bias_E.numel()
        self.average_E = torch.zeros(num_experts)
        self.has_average = False
        self.counts_EN = torch.zeros(num_experts, num_bins, dtype=torch.int64)
        self.loads_E = torch.zeros(num_experts, dtype=torch.int64)
        self.tokens = torch.zeros(1, dtype=torch.int64)
        self.low, self.width = histogram_range(self.bias_E, num_bins)

    def observe(self, scores_TE: Tensor, cut_T: Tensor) -> None:
        if not self.router.training:
            return
        scores_TE, cut_T = scores_TE.detach(), cut_T.detach()
        self.counts_EN += histogram_counts(scores_TE, cut_T, self.low, self.width, self.num_bins)
        self.loads_E += (scores_TE + self.bias_E > cut_T[:, None]).sum(dim=0)
        self.tokens += scores_TE.shape[0]

    def update(self, ema: float | None) -> None:
        needed_E = histogram_bias(
            self.counts_EN, self.low, self.width, int(self.tokens), self.top_k
        )
        if ema is not None:
            if self.has_average:
                needed_E = ema * self.average_E + (1 - ema) * needed_E
            self.average_E.copy_(needed_E)
            self.has_average = True
        self.bias_E.copy_(needed_E - needed_E.mean())

    def reset(self) -> None:
        self.counts_EN.zero_()
        self.loads_E.zero_()
        self.tokens.zero_()
        self.low, self.width = histogram_range(self.bias_E, self.num_bins)


class QuantileBalancer:
    """Counts router scores during training steps and sets the biases between them.

    Args:
        routers: Router modules by name; each offers ``observer``, ``training`` and the buffer
            ``e_score_correction_bias``. Their observers are taken over.
        num_experts_per_token: k.
        num_bins: Histogram resolution.
        ema: Weight of the past in a running mean of the required bias, or None for none.

    Raises:
        ConfigError: k equals E, or ``ema`` lies outside [0, 1).
    """

    def __init__(
        self,
        routers: Mapping[str, nn.Module],
        num_experts_per_token: int,
        *,
        num_bins: int = NUM_BINS,
        ema: float | None = None,
    ) -> None:
        if ema is not None and not 0 <= ema < 1:
            raise ConfigError(f"balancing.ema is {ema}; it must be in [0, 1)")
        self._ema = ema
        self._layers: dict[str, _Layer] = {}
        for name, router in routers.items():
            layer = _Layer(router, num_experts_per_token, num_bins)
            _check_experts(layer.bias_E.numel(), num_experts_per_token)
            self._layers[name] = layer
            layer.router.observer = layer.observe

    def reduce(self, reducer: SumReducer) -> None:
        """Add up the counts of all processes, in one message."""
        tensors = [t for x in self._layers.values() for t in (x.counts_EN, x.loads_E, x.tokens)]
        if not tensors or reducer.world_size == 1:
            return
        joined = torch.cat([t.flatten() for t in tensors])
        reducer.sum_(joined)
        for tensor, part in zip(tensors, joined.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def update(self, *, apply: bool = True) -> BalanceReport:
        """Set the biases from the counts of this step and start the next.

        Args:
            apply: Set the biases; False only clears the counts (a skipped step).
        """
        overload = dead = spread = 0.0
        for layer in self._layers.values():
            if int(layer.tokens) > 0:
                mean_load = float(layer.tokens) * layer.top_k / layer.loads_E.numel()
                overload = max(overload, float(layer.loads_E.max()) / mean_load - 1)
                dead = max(dead, float((layer.loads_E == 0).float().mean()))
                if apply:
                    layer.update(self._ema)
            spread = max(spread, float(layer.bias_E.max() - layer.bias_E.min()))
            layer.reset()
        return BalanceReport(overload, dead, spread)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return bias and running mean of each router by name; views, writable in place."""
        tensors: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            tensors[f"{name}.bias"] = layer.bias_E
            tensors[f"{name}.average"] = layer.average_E
        return tensors

    def state(self) -> dict[str, bool]:
        """Return which routers have a running mean."""
        return {name: layer.has_average for name, layer in self._layers.items()}

    def restore(self, state: Mapping[str, bool]) -> None:
        """Take over `state` after the tensors were written back; clears the counts."""
        for name, layer in self._layers.items():
            layer.has_average = state[name]
            layer.reset()

    def detach(self) -> None:
        """Stop observing the routers."""
        for layer in self._layers.values():
            layer.router.observer = None


def _check_experts(num_experts: int, num_experts_per_token: int) -> None:
    if num_experts_per_token >= num_experts:
        raise ConfigError(
            f"num_experts_per_token is {num_experts_per_token} of {num_experts} experts; "
            "Quantile Balancing needs at least one expert that is not chosen"
        )
