"""Where the latent rows of a batch lie: pages of a cache and a table, read without copying.

A row is what Gated MLA keeps of one token: the normalised latent, then the key part shared by all
heads. A cache hands its memory out as it is; an operator looks rows up through the table.

Letters: S sequences, G pages, L rows per page, C row width = R + P, R kv_lora_rank, P shared key
width, B pages per sequence, J packed context rows, N longest context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels.ragged import Ragged

__all__ = ["LatentPages"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentPages:
    """Context rows of S sequences: row n of sequence s is ``rows[table[s, n // L], n % L]``.

    Valid are the first ``lengths_S[s]`` rows of a sequence. Every other row of the pages may hold
    anything, NaN included, and is never read; table entries beyond a sequence's last row are page
    numbers in range but may name any page. The memory belongs to the cache that made the object:
    read it, never write it, and only until the cache's next `append`.

    Attributes:
        rows_GLC: Floating point, latent first.
        table_SB: int64 page numbers in order of position.
        lengths_S: int64, each at least 1 and at most ``B L``.
        latent_size: R.
    """

    rows_GLC: Tensor
    table_SB: Tensor
    lengths_S: Tensor
    latent_size: int

    def __post_init__(self) -> None:
        """Check ranks and sizes; values are trusted.

        Raises:
            ShapeError: A tensor has another rank, or S or the widths do not fit.
        """
        ranks = (self.rows_GLC.dim(), self.table_SB.dim(), self.lengths_S.dim())
        if ranks != (3, 2, 1) or self.table_SB.shape[0] != self.lengths_S.shape[0]:
            raise ShapeError(
                f"rows {list(self.rows_GLC.shape)}, table {list(self.table_SB.shape)} and lengths "
                f"{list(self.lengths_S.shape)} do not fit; [G, L, C], [S, B] and [S] are needed"
            )
        if not 0 < self.latent_size < self.rows_GLC.shape[2]:
            raise ShapeError(
                f"latent_size is {self.latent_size} in rows of {self.rows_GLC.shape[2]}; latent "
                "and shared key part must both have a width"
            )

    @property
    def shared_size(self) -> int:
        """P."""
        return self.rows_GLC.shape[2] - self.latent_size

    @cached_property
    def context(self) -> Ragged:
        """Borders of the J context rows when all sequences are packed one after the other."""
        return Ragged.build(self.lengths_S.tolist(), self.rows_GLC.device)

    def select(self, seqs: Tensor) -> LatentPages:
        """Return the sequences with the int64 indices ``seqs``, over the same memory."""
        return LatentPages(
            rows_GLC=self.rows_GLC,
            table_SB=self.table_SB[seqs],
            lengths_S=self.lengths_S[seqs],
            latent_size=self.latent_size,
        )

    def by_row(self, new: Ragged) -> LatentPages:
        """Return one sequence per new row, which sees the context up to itself.

        Args:
            new: Borders of the new rows, the last ones of every sequence.
        """
        starts_S = self.lengths_S - new.lens_S
        return LatentPages(
            rows_GLC=self.rows_GLC,
            table_SB=self.table_SB[new.seq_of_T],
            lengths_S=starts_S[new.seq_of_T] + new.offset_T + 1,
            latent_size=self.latent_size,
        )

    def packed(self) -> tuple[Tensor, Tensor]:
        """Copy the valid rows to ``latent_JR`` and ``k_shared_JP``, borders as in `context`."""
        page_size = self.rows_GLC.shape[1]
        seq_J, position_J = self.context.seq_of_T, self.context.offset_T
        page_J = self.table_SB[seq_J, position_J // page_size]
        index_J = page_J * page_size + position_J % page_size
        rows_JC = self.rows_GLC.flatten(0, 1).index_select(0, index_J)
        latent_JR, k_shared_JP = rows_JC.split([self.latent_size, self.shared_size], dim=1)
        return latent_JR, k_shared_JP

    def padded(self) -> tuple[Tensor, Tensor]:
        """Copy to ``latent_SNR`` and ``k_shared_SNP``, zeros beyond each length."""
        latent_JR, k_shared_JP = self.packed()
        return self.context.pad(latent_JR), self.context.pad(k_shared_JP)
