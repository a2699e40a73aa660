"""Native AttnRes for inference: the mix, and the same in two phases (model.md section 3.2).

Everything is float32. In a decode step the mixes run once per sublayer on one row, so the checks
here are few and cheap: shapes of a fold are those that `attn_res_fold` made.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native_ops
from moonlet.kernels.attn_res.reference import BlockFold

__all__ = ["attn_res_fold", "attn_res_join", "attn_res_mix"]


def attn_res_mix(
    blocks: Sequence[Tensor], prefix_TD: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    """Arguments and result as in `reference.attn_res_mix`; at most 63 blocks.

    Raises:
        ShapeError: A tensor is not float32 on the CPU, or differs in shape.
    """
    if not blocks:
        return prefix_TD
    sources = [_checked("source", x, prefix_TD.shape) for x in (*blocks, prefix_TD)]
    rows, size = prefix_TD.shape
    weight_D = _checked("weight", weight_D, (size,))
    out_TD = torch.empty_like(sources[-1])
    addresses = array("q", [x.data_ptr() for x in sources])
    _native_ops.call(
        "attn_res_mix",
        *(addresses, len(sources), weight_D, out_TD, rows, size, eps),
    )
    return out_TD


def attn_res_fold(blocks: Sequence[Tensor], weight_MD: Tensor, eps: float) -> BlockFold:
    """Arguments and result as in `reference.attn_res_fold`; at most 64 blocks.

    Raises:
        ShapeError: A tensor is not float32 on the CPU, or differs in shape.
    """
    rows, size = blocks[0].shape
    blocks = [_checked("block", x, (rows, size)) for x in blocks]
    sublayers = weight_MD.shape[0]
    weight_MD = _checked("weight", weight_MD, (sublayers, size))
    m_MT, l_MT = torch.empty(2, sublayers, rows, dtype=torch.float32).unbind()
    acc_MTD = torch.empty(sublayers, rows, size, dtype=torch.float32)
    addresses = array("q", [x.data_ptr() for x in blocks])
    _native_ops.call(
        "attn_res_fold",
        *(addresses, len(blocks), weight_MD, m_MT, l_MT, acc_MTD),
        *(sublayers, rows, size, eps),
    )
    return BlockFold(m_MT, l_MT, acc_MTD, weight_MD)


def attn_res_join(fold: BlockFold, index: int, prefix_TD: Tensor, eps: float) -> Tensor:
    """Arguments and result as in `reference.attn_res_join`; the fold is this module's, unchanged.

    Raises:
        ShapeError: The prefix is not float32 on the CPU, differs in shape, or ``index`` is not a
            sublayer of the fold.
    """
    m_MT, l_MT, acc_MTD, weight_MD = fold
    sublayers, rows, size = acc_MTD.shape
    prefix_TD = _checked("prefix", prefix_TD, (rows, size))
    if not 0 <= index < sublayers:
        raise ShapeError(f"sublayer {index} of a fold for {sublayers}")
    out_TD = torch.empty_like(prefix_TD)
    # addresses instead of views: indexing a tensor costs as much as the whole operator on one row
    row, element = 4 * index * rows, 4 * index * size
    _native_ops.call(
        "attn_res_join",
        m_MT.data_ptr() + row,
        l_MT.data_ptr() + row,
        acc_MTD.data_ptr() + element * rows,
        prefix_TD.data_ptr(),
        weight_MD.data_ptr() + element,
        out_TD.data_ptr(),
        *(rows, size, eps),
    )
    return out_TD


def _checked(name: str, x: Tensor, shape: Sequence[int]) -> Tensor:
    if not (x.is_cpu and x.dtype == torch.float32 and x.shape == shape):
        raise ShapeError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; the native kernel reads float32 "
            f"{list(shape)} on the CPU"
        )
    return x.contiguous()
