"""From logits to the next token id, one shared pipeline for every request.

Order (speculative.md section 5.1): penalties, grammar mask, temperature, then min-p, top-k and
top-p, each on what the one before left over; all from the temperature on is the operator `sample`.
Draws are counter-based: the uniform number of the n-th generated token is a hash of the request's
seed and n, so a seeded request gives the same tokens alone, in any batch and after any replay. A
row without a usable distribution (NaN, +inf, nothing allowed) fails its request and no other.

Drafts are verified by the same pipeline. Row i of a window is chosen as plain decoding would choose
after drafts 1 to i: with their penalties, in the constraint's state after them, with the uniform
number of that place. Draft i + 1 is accepted where it is that choice; the first other choice is
emitted in its place. A one-hot draft d is so accepted with probability p(d), and what replaces it
has the law of p without d: the token rule of speculative.md section 5.2, with the same ids as
without drafts. `choose` changes nothing; `settle` makes a choice part of its sequence.

Shapes: Q rows with logits, M rows that are drawn, W vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moonlet.core.constraint import TokenConstraint
from moonlet.engine.constraints import allowed_words, assumed
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


class _Row(NamedTuple):
    """Whose next id a row of logits gives, after ``drafted`` beyond the sequence's own ids."""

    sequence: Sequence
    drafted: SequenceOf[int] = ()


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

    def apply(
        self, logits_W: Tensor, params: SamplingParams, drafted: SequenceOf[int] = ()
    ) -> Tensor:
        """Return the logits with the three penalties: repetition, frequency, presence.

        Args:
            logits_W: Not modified.
            params: Strength of the penalties.
            drafted: Ids that are counted as generated for this call.
        """
        counts_W, is_seen_W = self.output_counts_W, self.is_seen_W
        if drafted:
            ids = torch.tensor(drafted, dtype=torch.int64, device=counts_W.device)
            counts_W = counts_W.index_add(0, ids, torch.ones_like(ids, dtype=counts_W.dtype))
            is_seen_W = is_seen_W.index_fill(0, ids, True)
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            pushed_W = torch.where(logits_W > 0, logits_W / factor, logits_W * factor)
            logits_W = torch.where(is_seen_W, pushed_W, logits_W)
        logits_W = logits_W - params.frequency_penalty * counts_W
        return logits_W - params.presence_penalty * (counts_W > 0)


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
        """Choose one id per row and settle it; arguments as in `choose`, without drafts."""
        chosen = self.choose(logits_QW, sequences)
        return [self.settle(s, choice) for s, (choice,) in zip(sequences, chosen, strict=True)]

    def choose(
        self,
        logits_QW: Tensor,
        sequences: SequenceOf[Sequence],
        drafts: SequenceOf[SequenceOf[int]] | None = None,
    ) -> list[list[Sampled]]:
        """Choose the ids that follow each sequence; no sequence changes.

        Args:
            logits_QW: float32, not modified: of each sequence in order the row of its newest token
                and one row per draft.
            sequences: None of them twice.
            drafts: Per sequence ids that are taken for granted row by row; none when absent.

        Returns:
            Per sequence its accepted drafts and then one more id, or the error that ends it.
        """
        windows = drafts or [()] * len(sequences)
        rows = [
            _Row(s, ids[:i])
            for s, ids in zip(sequences, windows, strict=True)
            for i in range(len(ids) + 1)
        ]
        errors: dict[int, str] = {}
        best_Q, ids_Q = logits_QW.max(dim=1)
        for row, fine in enumerate(torch.isfinite(best_Q).tolist()):
            if not fine:
                errors[row] = "the model produced no finite distribution for this request"
        adjusted_QW = self._adjust(logits_QW, rows, errors)
        if adjusted_QW is not logits_QW:
            ids_Q = adjusted_QW.argmax(dim=1)
        ids = ids_Q.tolist()
        drawn = [
            i
            for i, row in enumerate(rows)
            if not row.sequence.request.sampling.is_greedy and i not in errors
        ]
        if drawn:
            for i, id in zip(drawn, self._draw(adjusted_QW, rows, drawn), strict=True):
                ids[i] = id
        choices = [Sampled(id=id) for id in ids]
        for row, error in errors.items():
            choices[row] = Sampled(id=-1, error=error)
        reached = _reached_rows(choices, windows)
        self._report(logits_QW, rows, choices, [row for window in reached for row in window])
        return [[choices[row] for row in window] for window in reached]

    def settle(self, sequence: Sequence, choice: Sampled) -> Sampled:
        """Advance the constraint and the penalties of a sequence by an id that was chosen."""
        if choice.error is not None:
            return choice
        if sequence.request.constraint is not None:
            try:
                sequence.request.constraint.accept(choice.id)
            except Exception as error:
                return Sampled(id=-1, error=f"the constraint failed: {error}")
        if sequence.request.sampling.has_penalties:
            # the counts may have been made in inference mode, and change in no other
            with torch.inference_mode():
                self._penalties[sequence.request_id].add(choice.id)
        return choice

    def _adjust(self, logits_QW: Tensor, rows: SequenceOf[_Row], errors: dict[int, str]) -> Tensor:
        adjusted_QW = logits_QW
        for row, (sequence, drafted) in enumerate(rows):
            request = sequence.request
            is_plain = not request.sampling.has_penalties and request.constraint is None
            if is_plain or row in errors:
                continue
            logits_W = logits_QW[row]
            if request.sampling.has_penalties:
                counts = self._counts(sequence, logits_W.device)
                logits_W = counts.apply(logits_W, request.sampling, drafted)
            if request.constraint is not None:
                try:
                    logits_W = _masked(logits_W, request.constraint, drafted)
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

    def _draw(self, logits_QW: Tensor, rows: SequenceOf[_Row], drawn: list[int]) -> list[int]:
        owners = [rows[i].sequence for i in drawn]
        key = tuple(sequence.request_id for sequence in owners)
        if key != self._cached_key or self._cached_filters is None:
            params = [sequence.request.sampling for sequence in owners]
            self._cached_filters = filters_of(params, self.vocab_size, logits_QW.device)
            self._cached_key = key
        logits_MW = logits_QW if len(drawn) == len(logits_QW) else logits_QW[drawn]
        places = [len(rows[i].sequence.output_ids) + len(rows[i].drafted) for i in drawn]
        uniforms = [uniform(s.seed, place) for s, place in zip(owners, places, strict=True)]
        return self._sample(logits_MW, self._cached_filters, uniforms).tolist()

    @staticmethod
    def _report(
        logits_QW: Tensor, rows: SequenceOf[_Row], choices: list[Sampled], reached: list[int]
    ) -> None:
        """Put log probabilities to the reached choices whose requests want them."""
        wanted: dict[int, int] = {}
        for row in reached:
            count = rows[row].sequence.request.sampling.logprobs
            if count is not None and choices[row].error is None:
                wanted[row] = count
        if not wanted:
            return
        logprobs_MW = torch.log_softmax(logits_QW[list(wanted)].double(), dim=1)
        most = min(max(wanted.values()), logits_QW.shape[1])
        values_MN, ids_MN = logprobs_MW.topk(most, dim=1)
        for (row, count), logprobs_W, ids, values in zip(
            wanted.items(), logprobs_MW, ids_MN.tolist(), values_MN.tolist(), strict=True
        ):
            id = choices[row].id
            top = tuple(zip(ids[:count], values[:count], strict=True))
            report = TokenLogprobs(id=id, logprob=float(logprobs_W[id]), top=top)
            choices[row] = replace(choices[row], logprobs=report)


def _reached_rows(
    choices: SequenceOf[Sampled], windows: SequenceOf[SequenceOf[int]]
) -> list[range]:
    """Return the rows of each window up to the first that does not choose its draft."""
    reached, first = [], 0
    for drafts in windows:
        row = first
        for draft in drafts:
            if choices[row].error is not None or choices[row].id != draft:
                break
            row += 1
        reached.append(range(first, row + 1))
        first += len(drafts) + 1
    return reached


def _masked(logits_W: Tensor, constraint: TokenConstraint, drafted: SequenceOf[int]) -> Tensor:
    with assumed(constraint, drafted):
        words = allowed_words(constraint, logits_W.shape[0])
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits_W.shape[0]]
    is_allowed_W = torch.from_numpy(bits.astype(bool)).to(logits_W.device)
    return logits_W.masked_fill(~is_allowed_W, -torch.inf)
