"""Multi-head latent attention without positional encoding (model.md section 3.4).

Keys and values of every head come from one cached latent per token; a second cached part of the
key is shared by all heads. Prefill expands the latent to per-head keys and values; decode absorbs
the expansion into the query and the output instead. Both give the same result up to rounding.

The context comes as `LatentPages`, whose last rows of each sequence are those of the queries. The
expansion may be coarser than the activations (bfloat16 as published); it is widened exactly.

Letters: T packed rows, S sequences, M longest new part, N longest context, H heads,
Q = nope + shared query width, R kv_lora_rank, P shared key width, V value width,
O = nope + V rows of kv_b per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.ragged import Ragged

__all__ = ["MLAPrefillResult", "mla_append", "mla_decode", "mla_prefill"]


class MLAPrefillResult(NamedTuple):
    """Attention output and, when asked for, each head's largest scaled score (float32)."""

    o_THV: Tensor
    max_score_H: Tensor | None


def mla_append(pages_GLC: Tensor, rows_T: Tensor, latent_TR: Tensor, k_shared_TP: Tensor) -> None:
    """Write new rows to the pages of a cache.

    Args:
        pages_GLC: Pages of rows ``[latent | shared key]``. Modified in place.
        rows_T: int64 row numbers in the flattened pages, distinct.
        latent_TR: Latents, converted to the dtype of the pages.
        k_shared_TP: Shared key parts, likewise.
    """
    row_TC = torch.cat([latent_TR.detach(), k_shared_TP.detach()], dim=1)
    flat = pages_GLC.view(-1, pages_GLC.shape[2])
    flat.index_copy_(0, rows_T, row_TC.to(flat.dtype))


def mla_prefill(
    q_THQ: Tensor,
    pages: LatentPages,
    kv_b_HOR: Tensor,
    ragged: Ragged,
    with_max_score: bool = False,
) -> MLAPrefillResult:
    """Causal attention of new rows over their sequences' whole context.

    Args:
        q_THQ: Queries, nope part first.
        pages: Context including the new rows, which are the last ones of every sequence.
        kv_b_HOR: Expansion; the first nope rows of a head give its key, the rest its value.
        ragged: Borders of the new rows.
        with_max_score: Whether to report the largest score per head (QK-Clip).

    Returns:
        Output in the dtype of ``q_THQ``; softmax in float32, weights rounded to that dtype.
    """
    latent_SNR, k_shared_SNP = pages.padded()
    nope = q_THQ.shape[-1] - pages.shared_size
    expanded = torch.einsum("snr,hor->shno", latent_SNR, kv_b_HOR.to(latent_SNR.dtype))
    k_nope, value = expanded.split([nope, kv_b_HOR.shape[1] - nope], dim=-1)
    q_SHMQ = ragged.pad(q_THQ).transpose(1, 2)
    q_nope, q_shared = q_SHMQ.split([nope, pages.shared_size], dim=-1)
    scores = q_nope @ k_nope.transpose(-1, -2)
    scores = scores + q_shared @ k_shared_SNP.transpose(-1, -2)[:, None]
    scores = scores.float() * q_THQ.shape[-1] ** -0.5
    context = torch.arange(latent_SNR.shape[1], device=q_THQ.device)
    start_S = pages.lengths_S - ragged.lens_S
    last_SM = start_S[:, None] + torch.arange(ragged.max_len, device=q_THQ.device)
    hidden_SMN = context > last_SM[..., None]
    scores = scores.masked_fill(hidden_SMN[:, None], float("-inf"))
    max_score = None
    if with_max_score:
        absent_SM = torch.arange(ragged.max_len, device=q_THQ.device) >= ragged.lens_S[:, None]
        seen = scores.detach().masked_fill(absent_SM[:, None, :, None], float("-inf"))
        max_score = seen.amax(dim=(0, 2, 3))
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    o_SMHV = (weights @ value).transpose(1, 2)
    return MLAPrefillResult(ragged.unpad(o_SMHV), max_score)


def mla_decode(q_SHQ: Tensor, pages: LatentPages, kv_b_HOR: Tensor) -> Tensor:
    """Absorbed attention of one new row per sequence.

    Args:
        q_SHQ: Queries, nope part first.
        pages: Context including the new row.
        kv_b_HOR: Expansion as in `mla_prefill`.

    Returns:
        ``[S, H, V]`` in the dtype of ``q_SHQ``.
    """
    latent_SNR, k_shared_SNP = pages.padded()
    nope = q_SHQ.shape[-1] - pages.shared_size
    weight_HOR = kv_b_HOR.to(q_SHQ.dtype)
    w_key, w_value = weight_HOR.split([nope, kv_b_HOR.shape[1] - nope], dim=1)
    absorbed = torch.einsum("shq,hqr->shr", q_SHQ[..., :nope], w_key)
    scores = absorbed @ latent_SNR.transpose(-1, -2)
    scores = scores + q_SHQ[..., nope:] @ k_shared_SNP.transpose(-1, -2)
    scores = scores.float() * q_SHQ.shape[-1] ** -0.5
    context = torch.arange(latent_SNR.shape[1], device=q_SHQ.device)
    is_beyond = context >= pages.lengths_S[:, None]
    scores = scores.masked_fill(is_beyond[:, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(latent_SNR.dtype)
    return torch.einsum("shr,hvr->shv", weights @ latent_SNR, w_value)
