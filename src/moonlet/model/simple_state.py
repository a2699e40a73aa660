"""Two plain `ModelState`s: none at all (training) and dense tensors (tests, small tools).

Letters as in `model.state`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError, ShapeError
from moonlet.model.state import BatchMeta, KDAState, MLACache

__all__ = ["DenseState", "NoState"]


class _ZeroKDA:
    """KDA state of sequences that all start now and end with the batch."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._kda = config.kda
        self._dtype = dtype

    def load_conv(self, meta: BatchMeta) -> Tensor:
        if bool(meta.start_positions_S.any()):
            raise ShapeError("a state without memory cannot continue a sequence")
        width = self._kda.short_conv_kernel_size - 1
        shape = (meta.ragged.num_seqs, 3 * self._kda.projection_size, width)
        return torch.zeros(shape, dtype=self._dtype, device=meta.slots_S.device)

    def load(self, meta: BatchMeta) -> Tensor:
        heads, width = self._kda.num_heads, self._kda.head_dim
        return torch.zeros(meta.ragged.num_seqs, heads, width, width, device=meta.slots_S.device)

    def in_place(self, meta: BatchMeta) -> tuple[Tensor, Tensor]:
        recurrent = self.load(meta)
        return recurrent, torch.arange(meta.ragged.num_seqs, device=recurrent.device)

    def store(
        self,
        meta: BatchMeta,
        recurrent_SHKV: Tensor | None,
        conv_SCW: Tensor,
        emitted_EHKV: Tensor | None,
        emitted_conv_ECW: Tensor | None,
    ) -> None:
        return


class _BatchMLA:
    """MLA rows of this batch only."""

    def __init__(self) -> None:
        self._rows: tuple[Tensor, Tensor] | None = None

    def append(self, meta: BatchMeta, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
        self._rows = (latent_TR, k_shared_TP)

    def view(self, meta: BatchMeta) -> tuple[Tensor, Tensor, Tensor]:
        if self._rows is None:
            raise ShapeError("view() before append()")
        (latent, shared), self._rows = self._rows, None
        return meta.ragged.pad(latent), meta.ragged.pad(shared), meta.ragged.lens_S


class NoState:
    """No memory: every sequence starts and ends inside its batch (training, scoring)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        self._kda = _ZeroKDA(config, dtype)

    def kda(self, layer: int) -> KDAState:
        """Zero state."""
        return self._kda

    def mla(self, layer: int) -> MLACache:
        """Rows of the running batch."""
        return _BatchMLA()

    def commit(self, meta: BatchMeta, num_rows: Sequence[int]) -> None:
        """There is nothing to keep."""
        return


class _DenseKDA:
    def __init__(self, recurrent: Tensor, conv: Tensor) -> None:
        self.recurrent = recurrent
        self.conv = conv
        self.pending: tuple[Tensor, Tensor] | None = None

    def load_conv(self, meta: BatchMeta) -> Tensor:
        fresh = meta.start_positions_S == 0
        return self.conv[meta.slots_S].masked_fill(fresh[:, None, None], 0.0)

    def load(self, meta: BatchMeta) -> Tensor:
        fresh = meta.start_positions_S == 0
        return self.recurrent[meta.slots_S].masked_fill(fresh[:, None, None, None], 0.0)

    def in_place(self, meta: BatchMeta) -> tuple[Tensor, Tensor]:
        self.recurrent[meta.slots_S[meta.start_positions_S == 0]] = 0.0
        return self.recurrent, meta.slots_S

    def store(
        self,
        meta: BatchMeta,
        recurrent_SHKV: Tensor | None,
        conv_SCW: Tensor,
        emitted_EHKV: Tensor | None,
        emitted_conv_ECW: Tensor | None,
    ) -> None:
        settled = ~meta.tentative_S
        slots = meta.slots_S[settled]
        if recurrent_SHKV is not None:
            self.recurrent[slots] = recurrent_SHKV[settled]
        self.conv[slots] = conv_SCW[settled].to(self.conv.dtype)
        if emitted_EHKV is not None and emitted_conv_ECW is not None:
            self.pending = (emitted_EHKV, emitted_conv_ECW)

    def commit(self, meta: BatchMeta, num_rows: Sequence[int]) -> None:
        if self.pending is None:
            raise ShapeError("commit() without a tentative forward")
        (recurrent, conv), self.pending = self.pending, None
        first = 0
        for s, length in enumerate(meta.seq_lens):
            if not meta.tentative[s]:
                continue
            if num_rows[s]:
                slot = meta.slots_S[s]
                self.recurrent[slot] = recurrent[first + num_rows[s] - 1]
                self.conv[slot] = conv[first + num_rows[s] - 1].to(self.conv.dtype)
            first += length


class _DenseMLA:
    def __init__(self, latent: Tensor, shared: Tensor) -> None:
        self.latent = latent
        self.shared = shared

    def append(self, meta: BatchMeta, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
        longest, room = (
            int((meta.start_positions_S + meta.ragged.lens_S).max()),
            len(self.latent[0]),
        )
        if longest > room:
            raise CapacityError(f"a sequence of {longest} rows does not fit into {room}")
        slots = meta.slots_S[meta.ragged.seq_of_T]
        self.latent[slots, meta.positions_T] = latent_TR.detach().to(self.latent.dtype)
        self.shared[slots, meta.positions_T] = k_shared_TP.detach().to(self.shared.dtype)

    def view(self, meta: BatchMeta) -> tuple[Tensor, Tensor, Tensor]:
        lengths = meta.start_positions_S + meta.ragged.lens_S
        longest = int(lengths.max())
        return (
            self.latent[meta.slots_S, :longest],
            self.shared[meta.slots_S, :longest],
            lengths,
        )


class DenseState:
    """One dense tensor per layer and kind, sized for the longest sequence.

    Args:
        config: Architecture.
        num_slots: Sequences that can be held.
        max_len: Longest sequence.
        dtype: Model dtype (recurrent states stay float32).
        device: Where the tensors live.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        kda, mla = config.kda, config.mla
        width = kda.short_conv_kernel_size - 1
        state_shape = (num_slots, kda.num_heads, kda.head_dim, kda.head_dim)
        conv_shape = (num_slots, 3 * kda.projection_size, width)
        self.max_len = max_len
        self.kda_layers = {
            layer: _DenseKDA(
                torch.zeros(state_shape, device=device),
                torch.zeros(conv_shape, dtype=dtype, device=device),
            )
            for layer in config.kda_layers
        }
        self.mla_layers = {
            layer: _DenseMLA(
                torch.zeros(num_slots, max_len, mla.kv_lora_rank, dtype=dtype, device=device),
                torch.zeros(num_slots, max_len, mla.qk_rope_head_dim, dtype=dtype, device=device),
            )
            for layer in config.mla_layers
        }

    def kda(self, layer: int) -> KDAState:
        """State of a KDA layer."""
        return self.kda_layers[layer]

    def mla(self, layer: int) -> MLACache:
        """Cache of an MLA layer."""
        return self.mla_layers[layer]

    def commit(self, meta: BatchMeta, num_rows: Sequence[int]) -> None:
        """Keep the first rows of every tentative sequence.

        Raises:
            CapacityError: A count is larger than the window.
        """
        for s, length in enumerate(meta.seq_lens):
            if meta.tentative[s] and not 0 <= num_rows[s] <= length:
                raise CapacityError(f"cannot commit {num_rows[s]} rows of a window of {length}")
        for layer in self.kda_layers.values():
            layer.commit(meta, num_rows)
