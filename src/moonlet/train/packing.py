"""Packing: documents of one step into ragged batches (training.md section 7.1).

Documents are never split or padded; each keeps its own sequence in `BatchMeta`, so states,
convolutions and attention restart at its first token. The label of a row is the next token of
the same document where that token is supervised, else `IGNORE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonlet.core.errors import ConfigError
from moonlet.model.state import BatchMeta

__all__ = ["IGNORE", "Document", "PackedBatch", "pack"]

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Document:
    """One training text.

    Attributes:
        ids: Token ids, at least two.
        mask: True where the token itself is a training target; same length.
    """

    ids: tuple[int, ...]
    mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        """Check the lengths."""
        if len(self.ids) != len(self.mask):
            raise ConfigError(f"document has {len(self.ids)} ids but {len(self.mask)} mask entries")
        if len(self.ids) < 2:
            raise ConfigError(f"document has {len(self.ids)} tokens; at least two are needed")


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A ragged batch with its targets.

    Attributes:
        tokens_T: int64 ids of all documents, one after the other.
        labels_Q: int64 target of each supervised row.
        meta: Boundaries; its ``logits_at_Q`` are the supervised rows.
    """

    tokens_T: Tensor
    labels_Q: Tensor
    meta: BatchMeta

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return self.tokens_T.numel()


def pack(documents: Sequence[Document]) -> PackedBatch:
    """Pack documents, longest first, so that neighbours have similar lengths.

    Args:
        documents: At least one document.

    Raises:
        ConfigError: There is no document, or none has a supervised token.
    """
    if not documents:
        raise ConfigError("cannot pack an empty list of documents")
    ordered = sorted(documents, key=lambda d: len(d.ids), reverse=True)
    tokens: list[int] = []
    labels: list[int] = []
    for document in ordered:
        tokens.extend(document.ids)
        shifted = zip(document.ids[1:], document.mask[1:], strict=True)
        labels.extend(token if is_target else IGNORE for token, is_target in shifted)
        labels.append(IGNORE)
    labels_T = torch.tensor(labels, dtype=torch.int64)
    rows_Q = (labels_T != IGNORE).nonzero()[:, 0]
    if rows_Q.numel() == 0:
        raise ConfigError("no document of the batch has a supervised token")
    meta = BatchMeta.build([len(d.ids) for d in ordered], logits=rows_Q.tolist())
    return PackedBatch(torch.tensor(tokens, dtype=torch.int64), labels_T[rows_Q], meta)
