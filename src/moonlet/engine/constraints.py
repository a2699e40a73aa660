"""Token constraints ahead of their sequence: masks, and ids that are only assumed.

A constraint follows the emitted ids. To judge drafts it is led along them and brought back, so that
nothing remains of a draft that is rejected (speculative.md section 5.5).
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress

import numpy as np

from moonlet.core.constraint import TokenConstraint

__all__ = ["allowed_words", "assumed", "legal_start"]


@contextmanager
def assumed(constraint: TokenConstraint, ids: SequenceOf[int]) -> Generator[None, None, None]:
    """Advance by ``ids`` for the length of a block; leaves the constraint as it was.

    Raises:
        Exception: Whatever the constraint raises; what it had accepted is undone.
    """
    num_accepted = 0
    try:
        for id in ids:
            constraint.accept(id)
            num_accepted += 1
        yield
    finally:
        if num_accepted:
            constraint.rollback(num_accepted)


def allowed_words(constraint: TokenConstraint, vocab_size: int) -> np.ndarray:
    """Return the bit mask of the next position, int32 ``[ceil(vocab_size / 32)]``."""
    words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    constraint.fill_mask(words)
    return words


def legal_start(
    constraint: TokenConstraint, drafts: SequenceOf[int], vocab_size: int
) -> SequenceOf[int]:
    """Cut drafts before the first one that is illegal or after which nothing may follow.

    The id that completes the constraint needs no row of its own: the row before it decides whether
    it is emitted. Where the constraint raises, the drafts end; the row of that place will tell.
    """
    num_kept = num_accepted = 0
    with suppress(Exception):
        for id in drafts:
            words = allowed_words(constraint, vocab_size)
            if not int(words[id // 32]) >> id % 32 & 1:
                break
            constraint.accept(id)
            num_accepted += 1
            if constraint.is_done():
                break
            num_kept += 1
    if num_accepted:
        constraint.rollback(num_accepted)
    return drafts[:num_kept]
