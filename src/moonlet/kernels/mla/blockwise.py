"""Causal latent attention in blocks of query rows, with its own backward.

Same result as `reference.mla_prefill` up to rounding. Sequences are not padded to the longest one
and a block of rows reads only the keys it may see, so the work is about half the triangle's
bounding square of each sequence. The backward keeps the attention weights of the forward:

    dV = P^T dO      dP = dO V^T      dS = P (dP - rowsum(dO O))      dQ = dS K      dK = dS^T Q

Letters: T packed rows, S sequences, J packed context rows, H heads, Q = nope + shared query width,
R kv_lora_rank, P shared key width, V value width, O = nope + V rows of kv_b per head, F = H O,
B rows of a block, C context rows a block reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.mla.reference import MLAPrefillResult
from moonlet.kernels.ragged import Ragged

__all__ = ["mla_prefill"]

BLOCK_ROWS = 128


class _Block(NamedTuple):
    """Query rows ``rows`` read context rows ``context``; the last ones are causal."""

    rows: slice
    context: slice


def _blocks(seq_lens: Sequence[int], starts: Sequence[int]) -> list[_Block]:
    blocks: list[_Block] = []
    row = context = 0
    for length, start in zip(seq_lens, starts, strict=True):
        for first in range(0, length, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, length)
            reach = slice(context, context + start + last)
            blocks.append(_Block(slice(row + first, row + last), reach))
        row += length
        context += start + length
    return blocks


class _CausalAttention(torch.autograd.Function):
    """``softmax(scale Q K^T, causal) V`` over blocks; all tensors ``[H, ..., width]``."""

    @staticmethod
    def forward(
        ctx: Any,
        q_HTQ: Tensor,
        k_HJQ: Tensor,
        v_HJV: Tensor,
        blocks: list[_Block],
        max_score_H: Tensor | None,
    ) -> Tensor:
        scale = q_HTQ.shape[-1] ** -0.5
        size = max(b.rows.stop - b.rows.start for b in blocks)
        above = torch.ones(size, size, dtype=torch.bool, device=q_HTQ.device).triu_(1)
        o_HTV = v_HJV.new_empty((*q_HTQ.shape[:2], v_HJV.shape[-1]))
        keeps = any(ctx.needs_input_grad[:3])
        weights: list[Tensor] = []
        for rows, context in blocks:
            scores = (q_HTQ[:, rows] @ k_HJQ[:, context].mT).float().mul_(scale)
            count = scores.shape[1]
            scores[..., -count:].masked_fill_(above[:count, :count], float("-inf"))
            if max_score_H is not None:
                torch.maximum(max_score_H, scores.amax((1, 2)), out=max_score_H)
            weight_HBC = torch.softmax(scores, dim=-1).to(v_HJV.dtype)
            o_HTV[:, rows] = weight_HBC @ v_HJV[:, context]
            if keeps:
                weights.append(weight_HBC)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.save_for_backward(q_HTQ, k_HJQ, v_HJV, o_HTV, *weights)
        return o_HTV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        do_HTV = gradients[0]
        q_HTQ, k_HJQ, v_HJV, o_HTV, *weights = ctx.saved_tensors
        dq_HTQ = torch.empty_like(q_HTQ)
        dk_HJQ, dv_HJV = torch.zeros_like(k_HJQ), torch.zeros_like(v_HJV)
        read_HT1 = (do_HTV.float() * o_HTV.float()).sum(-1, keepdim=True)
        for (rows, context), weight_HBC in zip(ctx.blocks, weights, strict=True):
            do_HBV = do_HTV[:, rows]
            dv_HJV[:, context] += weight_HBC.mT @ do_HBV
            ds_HBC = (do_HBV @ v_HJV[:, context].mT).float()
            ds_HBC = ds_HBC.sub_(read_HT1[:, rows]).mul_(weight_HBC).mul_(ctx.scale)
            ds_HBC = ds_HBC.to(q_HTQ.dtype)
            torch.matmul(ds_HBC, k_HJQ[:, context], out=dq_HTQ[:, rows])
            dk_HJQ[:, context] += ds_HBC.mT @ q_HTQ[:, rows]
        return dq_HTQ, dk_HJQ, dv_HJV, None, None


def mla_prefill(
    q_THQ: Tensor,
    pages: LatentPages,
    kv_b_HOR: Tensor,
    ragged: Ragged,
    with_max_score: bool = False,
) -> MLAPrefillResult:
    """Arguments and result as in `reference.mla_prefill`."""
    lengths = pages.context.seq_lens
    starts = [length - n for length, n in zip(lengths, ragged.seq_lens, strict=True)]
    latent_JR, shared_JP = pages.packed()
    heads, width, _ = kv_b_HOR.shape
    nope = q_THQ.shape[-1] - pages.shared_size
    weight_FR = kv_b_HOR.flatten(0, 1).to(latent_JR.dtype)
    expanded_JHO = (latent_JR @ weight_FR.mT).unflatten(-1, (heads, width))
    shared_JHP = shared_JP[:, None].expand(-1, heads, -1)
    k_HJQ = torch.cat([expanded_JHO[..., :nope], shared_JHP], dim=-1).transpose(0, 1)
    v_HJV = expanded_JHO[..., nope:].transpose(0, 1)
    max_score_H = None
    if with_max_score:
        max_score_H = torch.full((heads,), float("-inf"), device=q_THQ.device)
    o_HTV = _CausalAttention.apply(
        q_THQ.transpose(0, 1).contiguous(),
        k_HJQ.contiguous(),
        v_HJV.contiguous(),
        _blocks(ragged.seq_lens, starts),
        max_score_H,
    )
    return MLAPrefillResult(o_HTV.transpose(0, 1), max_score_H)
