"""What a layer may ask of the memory between tokens (architecture.md, "Ragged batch").

`BatchMeta` describes the running batch. `ModelState` hands each layer its part: a `KDAState` or an
`MLACache`. The model receives both as arguments and never asks where they live; the engine has its
own implementations. A tentative sequence (a verification window) is run without changing the
recurrent state until `ModelState.commit` keeps the first rows of it.

Letters: T packed rows, S sequences of the batch, H heads, K = V = KDA head width, C = 3 H K
convolution channels (q, k, v), W carried inputs, R kv_lora_rank, P shared key width, E emitted
rows, Q rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.ragged import Ragged

__all__ = ["BatchMeta", "BatchPart", "KDASlots", "KDAState", "KDAWindow", "MLACache", "ModelState"]


@dataclass(frozen=True, kw_only=True)
class BatchMeta:
    """One packed batch of prefill chunks, decode rows and verification windows.

    Attributes:
        ragged: Sequence borders.
        slots_S: Where each sequence's state lives, int64.
        start_positions_S: Rows already in the state, int64.
        is_decode: Per sequence, whether its rows take the absorbed attention form.
        tentative: Per sequence, whether the rows await `ModelState.commit`.
        logits_at_Q: Packed rows whose logits are wanted, int64.
    """

    ragged: Ragged
    slots_S: Tensor
    start_positions_S: Tensor
    is_decode: tuple[bool, ...]
    tentative: tuple[bool, ...]
    logits_at_Q: Tensor

    @staticmethod
    def build(
        seq_lens: Sequence[int],
        *,
        slots: Sequence[int] | None = None,
        start_positions: Sequence[int] | None = None,
        is_decode: Sequence[bool] | None = None,
        tentative: Sequence[bool] | None = None,
        logits: str | Sequence[int] = "last",
        device: torch.device | str = "cpu",
    ) -> BatchMeta:
        """Check and assemble a batch description.

        Args:
            seq_lens: New rows per sequence.
            slots: State slots, 0..S-1 when absent.
            start_positions: Rows already in the state, zeros when absent.
            is_decode: Absorbed attention per sequence; when absent, single rows that continue a
                sequence take it, and windows.
            tentative: Verification windows, none when absent.
            logits: ``last`` row of every sequence, ``all`` rows, or packed row numbers.
            device: Where the index tensors live.

        Raises:
            ShapeError: Lengths differ, slots repeat, or a decode sequence has several rows and is
                no window.
        """
        ragged = Ragged.build(seq_lens, device)
        count = ragged.num_seqs
        slot_list = list(range(count)) if slots is None else list(slots)
        starts = [0] * count if start_positions is None else list(start_positions)
        windows = (False,) * count if tentative is None else tuple(tentative)
        if is_decode is None:
            triples = zip(ragged.seq_lens, starts, windows, strict=False)
            decode = tuple(w or (n == 1 and start > 0) for n, start, w in triples)
        else:
            decode = tuple(is_decode)
        if not len(slot_list) == len(starts) == len(windows) == len(decode) == count:
            raise ShapeError(f"batch of {count} sequences got lists of other lengths")
        if len(set(slot_list)) != count:
            raise ShapeError(f"slots {slot_list} repeat; a sequence may appear once per batch")
        triples = zip(decode, ragged.seq_lens, windows, strict=True)
        if any(d and n != 1 and not w for d, n, w in triples):
            raise ShapeError("a decode sequence that is no window has exactly one row")
        if logits == "all":
            rows = torch.arange(ragged.num_rows, device=device)
        elif logits == "last":
            rows = ragged.cu_seqlens_S1[1:].long() - 1
        else:
            rows = torch.tensor([int(r) for r in logits], dtype=torch.int64, device=device)
        return BatchMeta(
            ragged=ragged,
            slots_S=torch.tensor(slot_list, dtype=torch.int64, device=device),
            start_positions_S=torch.tensor(starts, dtype=torch.int64, device=device),
            is_decode=decode,
            tentative=windows,
            logits_at_Q=rows,
        )

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """New rows per sequence."""
        return self.ragged.seq_lens

    @property
    def cu_seqlens_S1(self) -> Tensor:
        """Cumulative borders, int32."""
        return self.ragged.cu_seqlens_S1

    @cached_property
    def is_decode_S(self) -> Tensor:
        """`is_decode` as a bool tensor."""
        return torch.tensor(self.is_decode, device=self.slots_S.device)

    @cached_property
    def tentative_S(self) -> Tensor:
        """`tentative` as a bool tensor."""
        return torch.tensor(self.tentative, device=self.slots_S.device)

    @cached_property
    def tentative_rows_E(self) -> Tensor | None:
        """Packed rows of tentative sequences in order, or None when there are none."""
        if not any(self.tentative):
            return None
        return self.tentative_S[self.ragged.seq_of_T].nonzero()[:, 0]

    @property
    def is_plain_step(self) -> bool:
        """Whether every sequence has one row and none of them is tentative."""
        return self.ragged.is_single_rows and not any(self.tentative)

    @cached_property
    def positions_T(self) -> Tensor:
        """Position of each packed row in its whole sequence, int64."""
        return self.start_positions_S[self.ragged.seq_of_T] + self.ragged.offset_T

    @cached_property
    def parts(self) -> tuple[BatchPart | None, BatchPart | None]:
        """The decode part and the other part of the batch; an absent part is None."""
        return self._part(self.is_decode, True), self._part(self.is_decode, False)

    @cached_property
    def window_parts(self) -> tuple[BatchPart | None, BatchPart | None]:
        """The tentative part and the other part of the batch; an absent part is None."""
        return self._part(self.tentative, True), self._part(self.tentative, False)

    def _part(self, flags: tuple[bool, ...], wanted_flag: bool) -> BatchPart | None:
        chosen = [s for s, flag in enumerate(flags) if flag is wanted_flag]
        if not chosen:
            return None
        device = self.slots_S.device
        seqs = torch.tensor(chosen, dtype=torch.int64, device=device)
        if len(chosen) == len(flags):
            rows = torch.arange(self.ragged.num_rows, device=device)
            return BatchPart(seqs, rows, self.ragged, is_whole=True)
        wanted = torch.zeros(len(flags), dtype=torch.bool, device=device)
        wanted[seqs] = True
        rows = wanted[self.ragged.seq_of_T].nonzero()[:, 0]
        ragged = Ragged.build([self.seq_lens[s] for s in chosen], device)
        return BatchPart(seqs, rows, ragged, is_whole=False)


@dataclass(frozen=True)
class BatchPart:
    """Some sequences of a batch with their packed rows.

    Attributes:
        seqs: Indices into the batch's sequences, int64.
        rows: Indices into its packed rows, int64.
        ragged: Borders of the part.
        is_whole: Whether the part is the whole batch.
    """

    seqs: Tensor
    rows: Tensor
    ragged: Ragged
    is_whole: bool


class KDASlots(NamedTuple):
    """One KDA layer's memory itself: sequence s of the batch lies at index ``slots_S[s]``.

    Attributes:
        recurrent_GHKV: float32 and contiguous.
        conv_GCW: Raw inputs, oldest first.
        slots_S: int64, distinct.
    """

    recurrent_GHKV: Tensor
    conv_GCW: Tensor
    slots_S: Tensor


class KDAWindow(NamedTuple):
    """What one layer's windows are run from, now and again when it is known what to keep.

    Only projections of the rows, 4 H K + H numbers each. q, k and v are those before their
    convolution: its tail after any row is then among them, and to have its results too would take
    3 H K numbers more and spare the second run a twentieth of its arithmetic.

    Attributes:
        raw_EC: Raw q, k and v of the tentative rows, side by side.
        weights_CJ: Taps of q, k and v.
        z_EHK: Decay logits.
        beta_EH: Write logits.
        A_log_H: Log scale of the gate.
        dt_bias_HK: Bias of the gate.
        lower_bound: Bound of the gate; None for the softplus gate.
    """

    raw_EC: Tensor
    weights_CJ: Sequence[Tensor]
    z_EHK: Tensor
    beta_EH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    lower_bound: float | None


class KDAState(Protocol):
    """One KDA layer's state for the sequences of the running batch.

    A layer either copies carries and recurrent states out (`load_conv`, `load`) and hands new ones
    to `store`, or updates both where they lie (`in_place`). What is read is zero for sequences that
    start at position 0, whatever the slot held before.
    """

    @property
    def keeps_inputs(self) -> bool:
        """What tentative windows leave until `ModelState.commit`.

        True: the projected inputs of their rows, handed to `keep`. False: the states after each of
        their rows, handed to `store`.
        """
        ...

    def load_conv(self, meta: BatchMeta) -> Tensor:
        """Return a copy of the carries ``conv_SCW`` (raw inputs, oldest first)."""
        ...

    def load(self, meta: BatchMeta) -> Tensor:
        """Return a copy of the float32 states ``recurrent_SHKV``."""
        ...

    def in_place(self, meta: BatchMeta) -> KDASlots:
        """Return the memory itself.

        Clears the slots of sequences that start now. The caller may change the slots of the batch's
        sequences that are not tentative and no others, until the next batch.
        """
        ...

    def keep(self, meta: BatchMeta, rows: KDAWindow, replay: Callable[..., None]) -> KDAWindow:
        """Copy the projections of the tentative rows; they wait for `ModelState.commit`.

        Args:
            meta: The running batch.
            rows: Projections of all rows of the batch, in memory that the next layer may reuse.
            replay: The operator ``kda_replay`` that belongs to them.

        Returns:
            The copies, without rows of other sequences; valid until the window is settled.

        Raises:
            ShapeError: `keeps_inputs` is false.
        """
        ...

    def store(
        self,
        meta: BatchMeta,
        recurrent_SHKV: Tensor,
        conv_SCW: Tensor,
        emitted_EHKV: Tensor | None,
        emitted_conv_ECW: Tensor | None,
    ) -> None:
        """Keep the states after the last row of every sequence that is not tentative.

        For tentative sequences the emitted states, one per row of ``meta.tentative_rows_E``, wait
        for `ModelState.commit`; the stored state does not change.

        Args:
            meta: The running batch.
            recurrent_SHKV: States after the batch.
            conv_SCW: Carries after the batch.
            emitted_EHKV: States after each tentative row; None where there is none.
            emitted_conv_ECW: Carries after each tentative row; None where there is none.
        """
        ...


class MLACache(Protocol):
    """One Gated MLA layer's latent rows for the sequences of the running batch."""

    def append(self, meta: BatchMeta, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
        """Write rows ``[start, start + len)`` of every sequence; what lay beyond is void."""
        ...

    def view(self, meta: BatchMeta) -> LatentPages:
        """Return where the context of every sequence lies, the rows just appended included.

        Nothing is copied: the object reads the cache's own memory and is valid until the next
        `append`.
        """
        ...

    def view_rows(self, meta: BatchMeta) -> LatentPages:
        """Return the same with a sequence per packed row: its context ends with the row itself."""
        ...


class ModelState(Protocol):
    """Memory of all layers."""

    def kda(self, layer: int) -> KDAState:
        """State of 0-based KDA ``layer``."""
        ...

    def mla(self, layer: int) -> MLACache:
        """Cache of 0-based Gated MLA ``layer``."""
        ...

    def commit(self, meta: BatchMeta, num_rows: Sequence[int]) -> None:
        """Keep the first ``num_rows[s]`` rows of every tentative sequence s of the last forward.

        Entries of sequences that are not tentative are ignored. Zero keeps nothing.
        """
        ...
