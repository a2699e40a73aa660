"""Cases of Attention Residuals at the depth where every block is finished."""

from __future__ import annotations

from collections.abc import Iterator

from moonlet.bench import costs
from moonlet.bench.cases.case import Arguments, Case, Shape
from moonlet.kernels.attn_res.reference import BlockFold

__all__ = ["attn_res_fold", "attn_res_join", "attn_res_mix"]


def _blocks(shape: Shape) -> int:
    config = shape.config
    block = config.attn_res_block_size or config.num_hidden_layers
    return -(-config.num_hidden_layers // block)


def _mixes(shape: Shape) -> int:
    """Sublayers that share finished blocks: two in each layer of a block."""
    config = shape.config
    return 2 * min(config.attn_res_block_size or 1, config.num_hidden_layers)


def attn_res_mix(shape: Shape) -> Iterator[Case]:
    """The finished blocks and the prefix sum."""
    rows, size, blocks = shape.rows, shape.config.hidden_size, _blocks(shape)
    yield Case(
        cost=costs.attn_res_mix(rows, blocks + 1, size),
        make=lambda: (
            [shape.normal(rows, size) for _ in range(blocks)],
            shape.normal(rows, size),
            shape.weight(size),
            shape.config.rms_norm_eps,
        ),
    )


def attn_res_fold(shape: Shape) -> Iterator[Case]:
    """The finished blocks for every sublayer that shares them."""
    rows, size, blocks, mixes = shape.rows, shape.config.hidden_size, _blocks(shape), _mixes(shape)
    yield Case(
        cost=costs.attn_res_fold(rows, blocks, mixes, size),
        make=lambda: (
            [shape.normal(rows, size) for _ in range(blocks)],
            shape.weight(mixes, size),
            shape.config.rms_norm_eps,
        ),
    )


def attn_res_join(shape: Shape) -> Iterator[Case]:
    """The partial sums of the second of two sublayers, and the prefix sum."""
    rows, size = shape.rows, shape.config.hidden_size

    def make() -> Arguments:
        fold = BlockFold(
            m_MT=shape.normal(2, rows),
            l_MT=1 + shape.normal(2, rows).abs(),
            acc_MTD=shape.normal(2, rows, size),
            weight_MD=shape.weight(2, size),
        )
        return fold, 1, shape.normal(rows, size), shape.config.rms_norm_eps

    yield Case(cost=costs.attn_res_join(rows, size), make=make)
