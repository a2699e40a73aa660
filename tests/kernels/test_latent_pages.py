"""Pages of latent rows: what is read, in which order, and what never is."""

import pytest
import torch

from moonlet.core.errors import ShapeError
from moonlet.kernels.mla.pages import LatentPages


def make_pages() -> LatentPages:
    """Three sequences of 5, 2 and 4 rows on pages of 2; row n of sequence s holds 10 s + n."""
    rows_GLC = torch.full((7, 2, 3), torch.nan)
    table_SB = torch.tensor([[4, 1, 6], [2, 0, 0], [5, 3, 0]])
    for s, length in enumerate((5, 2, 4)):
        for n in range(length):
            rows_GLC[table_SB[s, n // 2], n % 2] = 10.0 * s + n
    lengths_S = torch.tensor([5, 2, 4])
    return LatentPages(rows_GLC=rows_GLC, table_SB=table_SB, lengths_S=lengths_S, latent_size=2)


def test_packed_rows_come_in_order_and_nothing_else_does() -> None:
    pages = make_pages()
    latent_JR, k_shared_JP = pages.packed()
    assert latent_JR.tolist() == [[x, x] for x in (0, 1, 2, 3, 4, 10, 11, 20, 21, 22, 23)]
    assert k_shared_JP[:, 0].tolist() == latent_JR[:, 0].tolist()
    assert pages.context.seq_lens == (5, 2, 4)
    assert pages.shared_size == 1


def test_padded_rows_are_zero_beyond_each_length() -> None:
    latent_SNR, k_shared_SNP = make_pages().padded()
    assert latent_SNR.shape == (3, 5, 2)
    assert k_shared_SNP[..., 0].tolist() == [
        [0, 1, 2, 3, 4],
        [10, 11, 0, 0, 0],
        [20, 21, 22, 23, 0],
    ]


def test_selected_sequences_share_the_memory() -> None:
    pages = make_pages()
    chosen = pages.select(torch.tensor([2, 0]))
    assert chosen.rows_GLC.data_ptr() == pages.rows_GLC.data_ptr()
    assert chosen.packed()[1][:, 0].tolist() == [20, 21, 22, 23, 0, 1, 2, 3, 4]


def test_gradients_reach_the_rows_and_only_valid_ones() -> None:
    rows = torch.ones(4, 2, 3, requires_grad=True)
    pages = LatentPages(
        rows_GLC=rows,
        table_SB=torch.tensor([[3, 1], [0, 2]]),
        lengths_S=torch.tensor([3, 1]),
        latent_size=2,
    )
    latent_SNR, k_shared_SNP = pages.padded()
    (latent_SNR.sum() + 2 * k_shared_SNP.sum()).backward()
    assert rows.grad is not None
    assert rows.grad[..., 0].tolist() == [[1, 0], [1, 0], [0, 0], [1, 1]]
    assert torch.equal(rows.grad[..., 2], 2 * rows.grad[..., 0])


@pytest.mark.parametrize(
    ("rows", "table", "lengths", "latent", "message"),
    [
        ((4, 3), (2, 2), (2,), 2, "do not fit"),
        ((4, 2, 3), (2,), (2,), 2, "do not fit"),
        ((4, 2, 3), (2, 2), (3,), 2, "do not fit"),
        ((4, 2, 3), (2, 2), (2,), 3, "latent_size is 3"),
        ((4, 2, 3), (2, 2), (2,), 0, "latent_size is 0"),
    ],
)
def test_impossible_pages_are_refused(
    rows: tuple[int, ...],
    table: tuple[int, ...],
    lengths: tuple[int, ...],
    latent: int,
    message: str,
) -> None:
    with pytest.raises(ShapeError, match=message):
        LatentPages(
            rows_GLC=torch.zeros(rows),
            table_SB=torch.zeros(table, dtype=torch.int64),
            lengths_S=torch.ones(lengths, dtype=torch.int64),
            latent_size=latent,
        )
