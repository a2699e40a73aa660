"""The writer of XTML elements (chat-protocol.md sections 1, 2.4 and 3.2).

An open tag ``<|open|>message role="user"<|sep|>`` is seven segments; only the three markup
tokens are control text. Values are escaped and stay ordinary text.
"""

from __future__ import annotations

from moonlet.chat.segments import Segment
from moonlet.chat.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP

__all__ = ["SegmentWriter", "escape_attribute"]


def escape_attribute(value: str) -> str:
    """Escape an attribute value: ``&`` first, then the quote; nothing else."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


class SegmentWriter:
    """Collects the segments of one rendering.

    Attributes:
        segments: What was written so far.
        generated: The mark that following segments get; see ``Segment.generated``.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.generated = False

    def text(self, text: str) -> None:
        """Write ordinary text; an empty string writes nothing."""
        if text:
            self.segments.append(Segment(text, False, self.generated))

    def control(self, text: str, *, generated: bool | None = None) -> None:
        """Write text whose control names are control tokens."""
        mark = self.generated if generated is None else generated
        self.segments.append(Segment(text, True, mark))

    def open_tag(self, name: str, /, **attributes: str) -> None:
        """Write an open tag with its attributes in the given order."""
        self.control(OPEN)
        self.text(name)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(escape_attribute(value))
            self.text('"')
        self.control(SEP)

    def close_tag(self, name: str) -> None:
        """Write a close tag."""
        self.control(CLOSE)
        self.text(name)
        self.control(SEP)

    def end_message(self) -> None:
        """Write the close tag of a message and the stop token."""
        self.close_tag("message")
        self.control(END_OF_MSG)
