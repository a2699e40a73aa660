"""The optimizer of a run: global-norm clip, Per-Head Muon, AdamW (training.md section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moonlet.core.errors import ConfigError
from moonlet.train.flat import FlatModel
from moonlet.train.groups import Assignment, GroupKind
from moonlet.train.muon import PerHeadMuon, SumReducer

__all__ = ["ModelOptimizer", "OptimizerOptions"]

_ADAMW_KINDS = (GroupKind.ADAMW_DECAY, GroupKind.ADAMW_PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """Settings shared by both optimizers; the learning rate comes from the schedule.

    Attributes:
        momentum: Muon momentum.
        nesterov: Muon look-ahead.
        weight_decay: Decoupled decay of matrices (embedding and head included).
        betas: AdamW moment decays.
        eps: AdamW denominator floor.
        clip_norm: Bound on the global gradient norm.
        router_optimizer: ``muon`` or ``adamw`` for the router weight.
        split_kv: Orthogonalise key and value rows of ``kv_b_proj`` apart.
    """

    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float = 1.0
    router_optimizer: str = "muon"
    split_kv: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.clip_norm <= 0:
            raise ConfigError(f"optimizer.clip_norm is {self.clip_norm}; it must be positive")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum is {self.momentum}; it must be in [0, 1)")
        if self.weight_decay < 0:
            raise ConfigError(f"optimizer.weight_decay is {self.weight_decay}; at least 0")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optimizer.betas is {self.betas}; two values in [0, 1)")


class ModelOptimizer:
    """Owns flat parameters and gradients and updates them.

    Args:
        model: Its parameters move into flat storage.
        assignments: One per parameter.
        options: Hyper-parameters.
    """

    def __init__(
        self, model: nn.Module, assignments: list[Assignment], options: OptimizerOptions
    ) -> None:
        self._clip_norm = options.clip_norm
        self.flat = FlatModel(model, assignments)
        self.muon = PerHeadMuon(
            self.flat,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            nesterov=options.nesterov,
        )
        # AdamW sees one flat parameter per group; names come back in `named_tensors`
        self._adamw_parts = [
            (kind, self._flat_parameter(self.flat.range_of(kind)))
            for kind in _ADAMW_KINDS
            if self.flat.of_kind(kind)
        ]
        decays = {GroupKind.ADAMW_DECAY: options.weight_decay, GroupKind.ADAMW_PLAIN: 0.0}
        self._adamw = torch.optim.AdamW(
            [{"params": [p], "weight_decay": decays[kind]} for kind, p in self._adamw_parts],
            lr=0.0,
            betas=(options.betas[0], options.betas[1]),
            eps=options.eps,
            foreach=True,
        )
        for _, parameter in self._adamw_parts:
            self._adamw.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _flat_parameter(self, where: slice) -> nn.Parameter:
        parameter = nn.Parameter(self.flat.values[where])
        parameter.grad = self.flat.gradients[where]
        return parameter

    def zero_gradients(self) -> None:
        """Clear the gradient buffer; the parameters' ``grad`` stay bound to it."""
        self.flat.gradients.zero_()

    def scale_and_clip(self, num_targets: float) -> float:
        """Turn summed gradients into means and bound their norm, in place.

        Args:
            num_targets: Supervised tokens behind the summed gradients.

        Returns:
            Global norm of the mean gradient before the clip.
        """
        gradients = self.flat.gradients
        norm = float(torch.linalg.vector_norm(gradients)) / num_targets
        gradients.mul_(min(1.0, self._clip_norm / (norm + 1e-6)) / num_targets)
        return norm

    @torch.no_grad()
    def step(self, lr: float, reducer: SumReducer | None = None) -> None:
        """Update every parameter in place.

        Args:
            lr: Learning rate of both optimizers.
            reducer: Process group that shares Muon's work, or None.
        """
        self.muon.step(lr, reducer)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def named_tensors(self) -> dict[str, Tensor]:
        """Return masters, momenta and moments by name; views, writable in place."""
        tensors = {f"master.{s.assignment.name}": s.view(self.flat.values) for s in self.flat.spans}
        for name, view in self.muon.named_momenta().items():
            tensors[f"muon.{name}"] = view
        for kind, parameter in self._adamw_parts:
            state = self._adamw.state[parameter]
            base = self.flat.range_of(kind).start
            for moment in ("exp_avg", "exp_avg_sq"):
                for name, view in self.flat.named_views(state[moment], kind, base=base).items():
                    tensors[f"adamw.{moment}.{name}"] = view
            tensors[f"adamw.step.{kind}"] = state["step"]
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors written by `named_tensors` back.

        Raises:
            KeyError: A tensor is missing.
        """
        for name, target in self.named_tensors().items():
            target.copy_(tensors[name])
