"""A tokenizer without merges: every byte is a token, then K3's control ids."""

from __future__ import annotations

from moonlet.chat.tokenizer import Tokenizer

__all__ = ["ByteTokenizer"]


class ByteTokenizer(Tokenizer):
    """`chat.Tokenizer` with ids 0..255 for bytes and 256..511 for K3's names in K3's order."""

    def __init__(self) -> None:
        super().__init__({bytes((value,)): value for value in range(256)})
