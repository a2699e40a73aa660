"""Two plain `ModelState`s: none at all (training) and dense tensors (tests, small tools).

Letters as in `model.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.core.errors import CapacityError, ShapeError
from moonlet.kernels.mla.pages import LatentPages
from moonlet.model.state import BatchMeta, KDASlots, KDAState, KDAWindow, MLACache

__all__ = ["DenseState", "NoState"]


class _KeepsStates:
    """A window leaves the states after each of its rows: the plain strategy."""

    keeps_inputs = False

    def keep(self, meta: BatchMeta, rows: KDAWindow, replay: Callable[..., None]) -> KDAWindow:
        raise ShapeError("this state takes the states after every row of a window, not its inputs")


class _ZeroKDA(_KeepsStates):
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

    def in_place(self, meta: BatchMeta) -> KDASlots:
        recurrent = self.load(meta)
        slots_S = torch.arange(meta.ragged.num_seqs, device=recurrent.device)
        return KDASlots(recurrent, self.load_conv(meta), slots_S)

    def store(
        self,
        meta: BatchMeta,
        recurrent_SHKV: Tensor,
        conv_SCW: Tensor,
        emitted_EHKV: Tensor | None,
        emitted_conv_ECW: Tensor | None,
    ) -> None:
        return


class _BatchMLA:
    """MLA rows of this batch only, in the graph of the running forward: one row per page."""

    def __init__(self) -> None:
        self._rows_TC: Tensor | None = None
        self._latent_size = 0

    def append(self, meta: BatchMeta, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
        self._rows_TC = torch.cat([latent_TR, k_shared_TP], dim=1)
        self._latent_size = latent_TR.shape[1]

    def view(self, meta: BatchMeta) -> LatentPages:
        if self._rows_TC is None:
            raise ShapeError("view() before append()")
        rows_TC, self._rows_TC = self._rows_TC, None
        ragged = meta.ragged
        position_M = torch.arange(ragged.max_len, device=rows_TC.device)
        row_SM = ragged.starts_S[:, None] + position_M
        return LatentPages(
            rows_GLC=rows_TC[:, None],
            table_SB=row_SM.clamp_(max=ragged.num_rows - 1),
            lengths_S=ragged.lens_S,
            latent_size=self._latent_size,
        )

    def view_rows(self, meta: BatchMeta) -> LatentPages:
        return self.view(meta).by_row(meta.ragged)


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


class _DenseKDA(_KeepsStates):
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

    def in_place(self, meta: BatchMeta) -> KDASlots:
        fresh = meta.slots_S[meta.start_positions_S == 0]
        self.recurrent[fresh] = 0.0
        self.conv[fresh] = 0.0
        return KDASlots(self.recurrent, self.conv, meta.slots_S)

    def store(
        self,
        meta: BatchMeta,
        recurrent_SHKV: Tensor,
        conv_SCW: Tensor,
        emitted_EHKV: Tensor | None,
        emitted_conv_ECW: Tensor | None,
    ) -> None:
        settled = ~meta.tentative_S
        slots = meta.slots_S[settled]
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
    """Rows ``[latent | shared key]`` of every slot: a slot is one page."""

    def __init__(self, rows_GLC: Tensor, latent_size: int) -> None:
        self.rows_GLC = rows_GLC
        self._latent_size = latent_size

    def append(self, meta: BatchMeta, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
        longest = int((meta.start_positions_S + meta.ragged.lens_S).max())
        room = self.rows_GLC.shape[1]
        if longest > room:
            raise CapacityError(f"a sequence of {longest} rows does not fit into {room}")
        slots_T = meta.slots_S[meta.ragged.seq_of_T]
        rows_TC = torch.cat([latent_TR.detach(), k_shared_TP.detach()], dim=1)
        self.rows_GLC[slots_T, meta.positions_T] = rows_TC.to(self.rows_GLC.dtype)

    def view(self, meta: BatchMeta) -> LatentPages:
        return LatentPages(
            rows_GLC=self.rows_GLC,
            table_SB=meta.slots_S[:, None],
            lengths_S=meta.start_positions_S + meta.ragged.lens_S,
            latent_size=self._latent_size,
        )

    def view_rows(self, meta: BatchMeta) -> LatentPages:
        return self.view(meta).by_row(meta.ragged)


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
                torch.zeros(num_slots, max_len, mla.cache_size, dtype=dtype, device=device),
                mla.kv_lora_rank,
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
