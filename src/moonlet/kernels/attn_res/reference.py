"""Attention Residuals: a softmax over depth replaces the residual stream (model.md section 3.2).

For sources ``v_0..v_n`` (finished blocks and the running prefix sum)::

    score_i = sum_d v_id * rsqrt(mean(v_i^2) + eps) * w_d        out = sum_i softmax(score)_i v_i

with ``w = norm.weight * proj.weight``. The two-phase form folds the finished blocks once for every
sublayer that shares them and then adds the prefix sum; both agree up to rounding.

Letters: N finished blocks, T packed rows, D hidden, M sublayers sharing the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockFold", "attn_res_fold", "attn_res_join", "attn_res_mix"]


class BlockFold(NamedTuple):
    """Online-softmax partial over the finished blocks, float32: maximum, sum, weighted sum.

    Attributes:
        weight_MD: The weights it was made with, which the second phase needs again.
    """

    m_MT: Tensor
    l_MT: Tensor
    acc_MTD: Tensor
    weight_MD: Tensor


def _scores(source: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``[..., D] -> [...]``, float32; ``source`` is float32 already."""
    rms = torch.rsqrt(source.square().mean(-1) + eps)
    return (source @ weight_D) * rms


def attn_res_mix(
    blocks: Sequence[Tensor], prefix_TD: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    """Mix the finished blocks and the prefix sum.

    Args:
        blocks: N tensors ``[T, D]`` in the model dtype; empty means the result is the prefix sum.
        prefix_TD: Running sum of the current block.
        weight_D: float32 product of the norm weight and the pseudo-query.
        eps: Norm epsilon.

    Returns:
        ``[T, D]`` in the model dtype; everything inside is float32.
    """
    if not blocks:
        return prefix_TD
    sources = torch.stack([*blocks, prefix_TD]).float()
    weights = torch.softmax(_scores(sources, weight_D, eps), dim=0)
    return (weights[..., None] * sources).sum(0).to(prefix_TD.dtype)


def attn_res_fold(blocks: Sequence[Tensor], weight_MD: Tensor, eps: float) -> BlockFold:
    """First phase: reduce the finished blocks for M sublayers at once.

    Args:
        blocks: At least one ``[T, D]`` tensor.
        weight_MD: float32 weights of the M sublayers that share these blocks.
        eps: Norm epsilon.
    """
    sources = torch.stack(list(blocks)).float()
    rms = torch.rsqrt(sources.square().mean(-1) + eps)
    scores_MNT = torch.einsum("ntd,md->mnt", sources, weight_MD) * rms
    m = scores_MNT.amax(1)
    exps = (scores_MNT - m[:, None]).exp()
    acc_MTD = torch.einsum("mnt,ntd->mtd", exps, sources)
    return BlockFold(m, exps.sum(1), acc_MTD, weight_MD)


def attn_res_join(fold: BlockFold, index: int, prefix_TD: Tensor, eps: float) -> Tensor:
    """Second phase: add the prefix sum to one sublayer's part of the fold and normalise.

    Args:
        fold: Result of `attn_res_fold`.
        index: Which of its M sublayers.
        prefix_TD: Running sum of the current block.
        eps: Norm epsilon.

    Returns:
        ``[T, D]`` in the model dtype.
    """
    m_T, l_T, acc_TD, weight_D = (part[index] for part in fold)
    prefix = prefix_TD.float()
    score_T = _scores(prefix, weight_D, eps)
    top_T = torch.maximum(m_T, score_T)
    old_T, new_T = (m_T - top_T).exp(), (score_T - top_T).exp()
    mixed = acc_TD * old_T[:, None] + prefix * new_T[:, None]
    return (mixed / (l_T * old_T + new_T)[:, None]).to(prefix_TD.dtype)
