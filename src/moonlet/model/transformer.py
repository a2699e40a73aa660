"""The text model of Kimi K3 and Kimi-Linear (model.md section 3).

``forward`` runs packed rows of any mix of prefill chunks, decode rows, verification windows or
training documents; what is remembered between calls lives in the `ModelState` argument.

Letters: T packed rows, D hidden, Q rows whose logits are wanted, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.kernels.registry import Kernels, resolve
from moonlet.model.attn_res import ATTN_RES_FORMS, Mixes, mix_modules, open_stream
from moonlet.model.layer import DecoderLayer
from moonlet.model.layers import Linear, RMSNorm, parameter
from moonlet.model.state import BatchMeta, ModelState

__all__ = ["Transformer"]


class _Embedding(nn.Module):
    """Holder of the token table ``[W, D]``."""

    def __init__(
        self, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.weight = parameter(vocab, hidden, dtype=dtype, device=device)


class Transformer(nn.Module):
    """A K3-family text model.

    Args:
        config: Architecture.
        kernels: Operators; ``auto`` choice when absent.
        dtype: Model dtype. Gates, convolution, norms' statistics and the router stay float32.
        device: Where parameters live; ``meta`` builds the structure without memory.
        attn_res_form: ``sequential`` or ``two_phase``; equal up to rounding.

    Attributes:
        config: The architecture.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        attn_res_form: str = "sequential",
    ) -> None:
        super().__init__()
        if attn_res_form not in ATTN_RES_FORMS:
            raise ConfigError(
                f"attn_res_form is {attn_res_form!r}; choose one of {', '.join(ATTN_RES_FORMS)}"
            )
        self.config = config
        self.attn_res_form = attn_res_form
        self.kernels = kernels if kernels is not None else resolve(device or "cpu", config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = _Embedding(config.vocab_size, hidden, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, self.kernels, dtype, device)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps, self.kernels, dtype, device)
        self.lm_head = Linear(hidden, config.vocab_size, dtype, device)
        self.output_attn_res_norm: RMSNorm | None = None
        self.output_attn_res_proj: Linear | None = None
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm, self.output_attn_res_proj = mix_modules(
                hidden, eps, self.kernels, dtype, device
            )
        for module in self.modules():
            if isinstance(module, Linear):
                module.operator = self.kernels.linear
        self._mixes = self._all_mixes()

    @property
    def dtype(self) -> torch.dtype:
        """Model dtype: that of activations; matrices may be stored coarser."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.embed_tokens.weight.device

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            if isinstance(layer, DecoderLayer):
                yield layer

    def _all_mixes(self) -> Mixes:
        """All mixes in network order."""
        parts = [part for layer in self._decoder_layers() for part in layer.mix_parts()]
        if self.output_attn_res_norm is not None and self.output_attn_res_proj is not None:
            parts.append((self.output_attn_res_norm, self.output_attn_res_proj))
        return Mixes(parts)

    def train(self, mode: bool = True) -> Transformer:
        """Switch between training and evaluation; products of earlier weights are dropped."""
        self._mixes.forget()
        return super().train(mode)

    def forward(self, tokens_T: Tensor, meta: BatchMeta, state: ModelState) -> Tensor:
        """Run the packed rows and update ``state``.

        Args:
            tokens_T: int64 token ids.
            meta: Batch description.
            state: Memory; must hold ``meta.start_positions_S`` rows of every sequence.

        Returns:
            ``[T, D]`` in the model dtype, after the output mix and before the final norm.
        """
        # two mixes a layer; a block closes after the attention mix of its first layer
        boundaries = [
            2 * index + 1
            for index, layer in enumerate(self._decoder_layers())
            if layer.starts_block
        ]
        embedded_TD = self.kernels.embed(tokens_T, self.embed_tokens.weight, self.dtype)
        stream = open_stream(embedded_TD, self._mixes, boundaries, self.kernels, self.attn_res_form)
        for layer in self._decoder_layers():
            layer(stream, meta, state)
        return stream.read()

    def logits(self, hidden_QD: Tensor) -> Tensor:
        """Return float32 logits ``[Q, W]`` of rows of ``forward``'s result."""
        return self.lm_head(self.norm(hidden_QD)).float()
