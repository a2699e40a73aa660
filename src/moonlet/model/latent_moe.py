"""Stable LatentMoE and the plain MoE of Kimi-Linear (model.md section 3.5; report section 2.4).

Router and shared experts read the layer input. Routed experts read its latent projection; their
weighted sum is normalised once and projected back.

Letters: T packed rows, D hidden, E experts, A experts per token, R expert input width,
F intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moonlet.core.config import ModelConfig, MoEConfig
from moonlet.kernels import mxfp4
from moonlet.kernels.mxfp4 import Packed
from moonlet.kernels.registry import Kernels
from moonlet.model.layers import GatedMLP, Linear, RMSNorm, gated_activation, parameter

__all__ = ["Experts", "LatentMoE", "Router"]


class Router(nn.Module):
    """Chooses experts; everything in float32.

    Attributes:
        observer: In training, called with unbiased scores ``[T, E]`` and cut-offs ``[T]``
            (Quantile Balancing).
    """

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.weight = parameter(moe.num_experts, hidden_size, dtype=dtype, device=device)
        bias = torch.zeros(moe.num_experts, dtype=torch.float32, device=device)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", bias)
        self.observer: Callable[[Tensor, Tensor], None] | None = None
        self._moe = moe
        self._route_topk = kernels.route_topk

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``ids_TA`` and float32 ``weights_TA``."""
        routed = self._route_topk(x_TD, self.weight, self.e_score_correction_bias, self._moe)
        if self.training and self.observer is not None:
            self.observer(routed.scores_TE.detach(), routed.cut_T)
        return routed.ids_TA, routed.weights_TA


class Experts(nn.Module):
    """All routed experts of a layer, stacked.

    Attributes:
        weight_transform: Applied to w1, w3, w2 before use (weight fake quantisation), or None.
        activation_transform: Applied to the inputs of w1/w3 and of w2, or None.
        activation_mode: Rounding of those inputs with packed weights; a key of
            `kernels.moe_mxfp4.reference.MODES`.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        size_in, width = config.expert_input_size, moe.moe_intermediate_size
        self.w1 = parameter(moe.num_experts, width, size_in, dtype=dtype, device=device)
        self.w3 = parameter(moe.num_experts, width, size_in, dtype=dtype, device=device)
        self.w2 = parameter(moe.num_experts, size_in, width, dtype=dtype, device=device)
        self.weight_transform: Callable[[Tensor], Tensor] | None = None
        self.activation_transform: Callable[[Tensor], Tensor] | None = None
        self.activation_mode = "bf16"
        self.num_experts = moe.num_experts
        self._is_packed = False
        self._activation = gated_activation(config, kernels)
        self._moe_experts, self._moe_mxfp4 = kernels.moe_experts, kernels.moe_mxfp4

    def pack(self) -> None:
        """Replace the matrices by empty MXFP4 pairs ``<name>_packed`` and ``<name>_scale``.

        The pairs are filled by a loader and cannot be trained.
        """
        for name in ("w1", "w3", "w2"):
            *lead, size = getattr(self, name).shape
            device = getattr(self, name).device
            delattr(self, name)
            for part, count in (("packed", size // 2), ("scale", size // mxfp4.GROUP_SIZE)):
                empty = torch.empty(*lead, count, dtype=torch.uint8, device=device)
                self.register_buffer(f"{name}_{part}", empty)
        self._is_packed = True

    def forward(self, z_TR: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """Return the weighted sum of expert outputs, float32 ``[T, R]``."""
        if self._is_packed:
            matrices = (
                Packed(getattr(self, f"{name}_packed"), getattr(self, f"{name}_scale"))
                for name in ("w1", "w3", "w2")
            )
            return self._moe_mxfp4(
                z_TR, ids_TA, weights_TA, *matrices, self._activation, self.activation_mode
            )
        w1, w3, w2 = self.w1, self.w3, self.w2
        if self.weight_transform is not None:
            w1, w3, w2 = (self.weight_transform(w) for w in (w1, w3, w2))
        return self._moe_experts(
            z_TR, ids_TA, weights_TA, w1, w3, w2, self._activation, self.activation_transform
        )


class LatentMoE(nn.Module):
    """One MoE layer, latent or plain."""

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, moe.routed_expert_hidden_size
        self._add = kernels.add
        self.gate = Router(hidden, moe, kernels, dtype, device)
        self.experts = Experts(config, moe, kernels, dtype, device)
        self.routed_expert_down_proj: Linear | None = None
        self.routed_expert_up_proj: Linear | None = None
        self.routed_expert_norm: RMSNorm | None = None
        self.shared_experts: GatedMLP | None = None
        if latent is not None:
            self.routed_expert_down_proj = Linear(hidden, latent, dtype, device)
            self.routed_expert_up_proj = Linear(latent, hidden, dtype, device)
            if moe.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(
                    latent, config.rms_norm_eps, kernels, dtype, device
                )
        if moe.num_shared_experts:
            self.shared_experts = GatedMLP(
                config, moe.shared_intermediate_size, kernels, dtype, device
            )

    def forward(self, x_TD: Tensor) -> Tensor:
        """Map ``[T, D] -> [T, D]``."""
        ids_TA, weights_TA = self.gate(x_TD)
        z_TR = x_TD
        if self.routed_expert_down_proj is not None:
            z_TR = self.routed_expert_down_proj(x_TD)
        y = self.experts(z_TR, ids_TA, weights_TA).to(x_TD.dtype)
        if self.routed_expert_norm is not None:
            y = self.routed_expert_norm(y)
        if self.routed_expert_up_proj is not None:
            y = self.routed_expert_up_proj(y)
        if self.shared_experts is not None:
            y = self._add(y, self.shared_experts(x_TD))
        return y
