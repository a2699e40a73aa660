"""The one thing the engine knows about grammars: a token constraint.

Grammars are compiled in `chat`, applied in `engine`; both meet at this protocol
(architecture.md, "Engine").
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["TokenConstraint"]


@runtime_checkable
class TokenConstraint(Protocol):
    """Says which token ids may come next in one sequence."""

    def fill_mask(self, out: Any) -> None:
        """Write the allowed ids of the next position.

        Args:
            out: int32 bitmask of ceil(vocab_size / 32) words, modified in place; bit i of the
                mask is set where token id i is allowed.
        """
        ...

    def accept(self, id: int) -> None:
        """Advance by one emitted token id, which must be allowed."""
        ...

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` accepted ids."""
        ...

    def is_done(self) -> bool:
        """Whether the constraint has reached a state in which nothing may follow."""
        ...
