"""From logits to the next token id, one shared pipeline for every request.

Order (speculative.md section 5.1): penalties, grammar mask, temperature, then min-p, top-k and
top-p, each on what the one before left over; all from the temperature on is the operator `sample`.
Draws are counter-based: the uniform number of the n-th generated token is a hash of the request's
seed and n, so a seeded request gives the same tokens alone, in any batch and after any replay. A
row without a usable distribution (NaN, +inf, nothing allowed) fails its request and no other.

Shapes: Q rows with logits, M rows that are drawn, W vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moonlet.core.constraint import TokenConstraint
from moonlet.engine.request import SamplingParams, Sequence, TokenLogprobs
from moonlet.kernels.registry import resolve_operator
from moonlet.kernels.sample.reference import Filters

__all__ = ["PenaltyCounts", "Sampled", "Sampler", "filters_of", "uniform"]

_NOTHING_ALLOWED = "the constraint allows no token here"
_PENALTIES_OVERFLOW = "the penalties leave no finite distribution for this request"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of one row: an id, or why there is none."""

    id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) of one generated position.

    Args:
        seed: Any 64-bit integer, signed or not.
        position: Index of the generated token, from 0.
    """
    key = struct.pack("<QQ", seed % (1 << 64), position)
    word = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (word >> 11) * 2.0**-53


def filters_of(
    params: SequenceOf[SamplingParams], vocab_size: int, device: torch.device | str = "cpu"
) -> Filters:
    """Return the sampling parameters of some rows as columns.

    Args:
        params: One per row, temperature above 0.
        vocab_size: W.
        device: Where the columns shall be.
    """

    def column(values: SequenceOf[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    return Filters(
        temperature_M1=column([p.temperature for p in params]),
        min_p_M1=column([p.min_p for p in params]) if any(p.min_p for p in params) else None,
        top_k_M1=column(top_k) if min(top_k) < vocab_size else None,
        top_p_M1=column([p.top_p for p in params]) if min(p.top_p for p in params) < 1 else None,
    )


class PenaltyCounts:
    """Which ids a sequence holds, as two vectors over the vocabulary.

    Args:
        vocab_size: W.
        prompt_ids: Ids of the prompt; counted for the repetition penalty only.
        output_ids: Ids generated so far.
    """

    def __init__(
        self,
        vocab_size: int,
        prompt_ids: SequenceOf[int],
        output_ids: SequenceOf[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.output_counts_W = torch.zeros(vocab_size, device=device)
        self.is_seen_W = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_seen_W[torch.tensor(list(prompt_ids), dtype=torch.int64, device=device)] = True
        for id in output_ids:
            self.add(id)

    def add(self, id: int) -> None:
        """Count one more generated id."""
        self.output_counts_W[id] += 1
        self.is_seen_W[id] = True

    def apply(self, logits_W: Tensor, params: SamplingParams) -> Tensor:
        """Return the logits with the three penalties: repetition, frequency, presence."""
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            pushed_W = torch.where(logits_W > 0, logits_W / factor, logits_W * factor)
            logits_W = torch.where(self.is_seen_W, pushed_W, logits_W)
        logits_W = logits_W - params.frequency_penalty * self.output_counts_W
        return logits_W - params.presence_penalty * (self.output_counts_W > 0)


class Sampler:
    """Chooses the next id of each row; remembers penalty counts per unfinished sequence.

    Args:
        vocab_size: W of the logits.
        device: Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self._sample = resolve_operator("sample", device)
        self._penalties: dict[str, PenaltyCounts] = {}
        self._cached_key: tuple[str, ...] = ()
        self._cached_filters: Filters | None = None

    def forget(self, sequence: Sequence) -> None:
        """Drop what is remembered of a sequence that has ended."""
        self._penalties.pop(sequence.request_id, None)
        # the id may come again, with other parameters
        if sequence.request_id in self._cached_key:
            self._cached_key = ()

    def tracked(self) -> set[str]:
        """Ids of the requests with remembered penalty counts."""
        return set(self._penalties)

    def sample(self, logits_QW: Tensor, sequences: SequenceOf[Sequence]) -> list[Sampled]:
        """Choose one id per row.

        Args:
            logits_QW: float32, not modified.
            sequences: Owner of each row; none of them twice.
        """
        reports = self._logprob_rows(logits_QW, sequences)
        errors: dict[int, str] = {}
        best_Q, ids_Q = logits_QW.max(dim=1)
        is_finite = torch.isfinite(best_Q).tolist()
        for row, fine in enumerate(is_finite):
            if not fine:
                errors[row] = "the model produced no finite distribution for this request"
        adjusted_QW = self._adjust(logits_QW, sequences, errors)
        if adjusted_QW is not logits_QW:
            ids_Q = adjusted_QW.argmax(dim=1)
        ids = ids_Q.tolist()
        drawn = [
            row
            for row, sequence in enumerate(sequences)
            if not sequence.request.sampling.is_greedy and row not in errors
        ]
        if drawn:
            for row, id in zip(drawn, self._draw(adjusted_QW, sequences, drawn), strict=True):
                ids[row] = id
        return [
            self._settle(row, id, sequence, errors, reports)
            for row, (id, sequence) in enumerate(zip(ids, sequences, strict=True))
        ]

    def _adjust(
        self, logits_QW: Tensor, sequences: SequenceOf[Sequence], errors: dict[int, str]
    ) -> Tensor:
        adjusted_QW = logits_QW
        for row, sequence in enumerate(sequences):
            request = sequence.request
            is_plain = not request.sampling.has_penalties and request.constraint is None
            if is_plain or row in errors:
                continue
            logits_W = logits_QW[row]
            if request.sampling.has_penalties:
                logits_W = self._counts(sequence, logits_W.device).apply(logits_W, request.sampling)
            if request.constraint is not None:
                try:
                    logits_W = _masked(logits_W, request.constraint)
                except Exception as error:
                    errors[row] = f"the constraint failed: {error}"
                    continue
            best = float(logits_W.max())
            if not math.isfinite(best):
                is_empty = best == -math.inf
                errors[row] = _NOTHING_ALLOWED if is_empty else _PENALTIES_OVERFLOW
                continue
            if adjusted_QW is logits_QW:
                adjusted_QW = logits_QW.clone()
            adjusted_QW[row] = logits_W
        return adjusted_QW

    def _counts(self, sequence: Sequence, device: torch.device) -> PenaltyCounts:
        counts = self._penalties.get(sequence.request_id)
        if counts is None:
            counts = PenaltyCounts(
                self.vocab_size, sequence.prompt_ids, sequence.output_ids, device
            )
            self._penalties[sequence.request_id] = counts
        return counts

    def _draw(
        self, logits_QW: Tensor, sequences: SequenceOf[Sequence], drawn: list[int]
    ) -> list[int]:
        owners = [sequences[row] for row in drawn]
        key = tuple(sequence.request_id for sequence in owners)
        if key != self._cached_key or self._cached_filters is None:
            params = [sequence.request.sampling for sequence in owners]
            self._cached_filters = filters_of(params, self.vocab_size, logits_QW.device)
            self._cached_key = key
        logits_MW = logits_QW if len(drawn) == len(logits_QW) else logits_QW[drawn]
        uniforms = [uniform(s.seed, len(s.output_ids)) for s in owners]
        return self._sample(logits_MW, self._cached_filters, uniforms).tolist()

    @staticmethod
    def _logprob_rows(
        logits_QW: Tensor, sequences: SequenceOf[Sequence]
    ) -> dict[int, tuple[Tensor, tuple[tuple[int, float], ...]]]:
        wanted = {
            row: sequence.request.sampling.logprobs
            for row, sequence in enumerate(sequences)
            if sequence.request.sampling.logprobs is not None
        }
        if not wanted:
            return {}
        logprobs_MW = torch.log_softmax(logits_QW[list(wanted)].double(), dim=1)
        most = min(max(wanted.values()), logits_QW.shape[1])
        values_MN, ids_MN = logprobs_MW.topk(most, dim=1)
        return {
            row: (logprobs_W, tuple(zip(ids[:count], values[:count], strict=True)))
            for (row, count), logprobs_W, ids, values in zip(
                wanted.items(), logprobs_MW, ids_MN.tolist(), values_MN.tolist(), strict=True
            )
        }

    def _settle(
        self,
        row: int,
        id: int,
        sequence: Sequence,
        errors: dict[int, str],
        reports: dict[int, tuple[Tensor, tuple[tuple[int, float], ...]]],
    ) -> Sampled:
        if row in errors:
            return Sampled(id=-1, error=errors[row])
        if sequence.request.constraint is not None:
            try:
                sequence.request.constraint.accept(id)
            except Exception as error:
                return Sampled(id=-1, error=f"the constraint failed: {error}")
        if sequence.request.sampling.has_penalties:
            self._penalties[sequence.request_id].add(id)
        logprobs = None
        if row in reports:
            logprobs_W, top = reports[row]
            logprobs = TokenLogprobs(id=id, logprob=float(logprobs_W[id]), top=top)
        return Sampled(id=id, logprobs=logprobs)


def _masked(logits_W: Tensor, constraint: TokenConstraint) -> Tensor:
    words = np.zeros((logits_W.shape[0] + 31) // 32, dtype=np.int32)
    constraint.fill_mask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits_W.shape[0]]
    is_allowed_W = torch.from_numpy(bits.astype(bool)).to(logits_W.device)
    return logits_W.masked_fill(~is_allowed_W, -torch.inf)
