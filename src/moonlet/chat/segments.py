"""The unit of rendering: a piece of text with the right, or not, to hold control tokens.

A rendered conversation is a list of segments (chat-protocol.md section 2.4). Every segment is
encoded alone, so no merge crosses a border, and only segments that the renderer itself wrote as
control text may become control ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Segment", "display_text"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a rendered conversation.

    Attributes:
        text: The characters, never empty in a rendered conversation.
        allow_special: Whether names of control tokens in ``text`` become control ids.
        generated: Whether the model itself writes this piece after a generation prefix; the
            supervised part of a training sample (training.md section 10).
    """

    text: str
    allow_special: bool = False
    generated: bool = False


def display_text(segments: Iterable[Segment]) -> str:
    """Join segments for display and tests; never encode the result again."""
    return "".join(segment.text for segment in segments)
