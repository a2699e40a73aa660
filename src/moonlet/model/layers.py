"""Small building blocks: linear maps without bias, norms, the gated MLP (model.md section 3).

Letters: D hidden, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moonlet.core.config import ModelConfig
from moonlet.kernels.linear import reference
from moonlet.kernels.linear.reference import Stored
from moonlet.kernels.microscaling import GROUP_SIZE
from moonlet.kernels.registry import Kernels
from moonlet.kernels.situ.gated import GatedActivation

__all__ = ["GatedMLP", "Linear", "RMSNorm", "gated_activation", "parameter"]


LinearOperator = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str | None) -> nn.Parameter:
    """Return an uninitialised parameter; weights come from a checkpoint or from `train.init`."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


class Linear(nn.Module):
    """``y = x W^T`` with ``weight`` stored ``[O, I]``; K3 has no biases.

    The weight may be stored coarser than the activations (`kernels.linear.reference`).
    """

    scale: Tensor | None

    def __init__(
        self, size_in: int, size_out: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.weight = parameter(size_out, size_in, dtype=dtype, device=device)
        self.register_buffer("scale", None)
        self.operator: LinearOperator = reference.linear

    @property
    def stored(self) -> Stored:
        """The weight with its scales, for products with several matrices."""
        return Stored(self.weight, self.scale)

    def pack(self) -> None:
        """Replace the matrix by an empty MXFP4 pair, which a loader fills and nobody trains."""
        size_out, size_in = self.weight.shape
        sizes = size_in // 2, size_in // GROUP_SIZE
        codes, scale = (self.weight.new_empty(size_out, n, dtype=torch.uint8) for n in sizes)
        self.weight, self.scale = nn.Parameter(codes, requires_grad=False), scale

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., I] -> [..., O]``."""
        return self.operator(x, self.weight, self.scale)


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale."""

    def __init__(
        self,
        size: int,
        eps: float,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        self.eps = eps
        self._rms_norm = kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return self._rms_norm(x, self.weight, self.eps)


def gated_activation(config: ModelConfig, kernels: Kernels) -> GatedActivation:
    """Return the (gate, up) activation that ``hidden_act`` names."""
    if config.hidden_act == "silu":
        return GatedActivation("silu", kernels.swiglu)
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    situ_glu = kernels.situ_glu

    def apply(gate: Tensor, up: Tensor) -> Tensor:
        return situ_glu(gate, up, beta, linear_beta)

    return GatedActivation("situ", apply, beta, linear_beta)


class GatedMLP(nn.Module):
    """``down(act(gate x, up x))``: the dense FFN and the fused shared experts."""

    def __init__(
        self,
        config: ModelConfig,
        intermediate_size: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate_proj = Linear(hidden, intermediate_size, dtype, device)
        self.up_proj = Linear(hidden, intermediate_size, dtype, device)
        self.down_proj = Linear(intermediate_size, hidden, dtype, device)
        self._activation = gated_activation(config, kernels)
        self._linear_many = kernels.linear_many

    def forward(self, x_TD: Tensor) -> Tensor:
        """Map ``[T, D] -> [T, D]``."""
        groups = ((self.gate_proj.stored,), (self.up_proj.stored,))
        return self.down_proj(self._activation(*self._linear_many(x_TD, groups)))
