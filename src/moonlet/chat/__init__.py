"""Text in and out: tokenizer, XTML rendering and parsing; no torch and no engine needed."""

from moonlet.chat.content import image_parts, image_prompt
from moonlet.chat.render import PartialPrompt, render, render_partial
from moonlet.chat.segments import Segment, display_text
from moonlet.chat.special_tokens import XTMLIds
from moonlet.chat.tokenizer import StreamDecoder, Tokenizer
from moonlet.chat.tool_results import assign_call_ids

__all__ = [
    "PartialPrompt",
    "Segment",
    "StreamDecoder",
    "Tokenizer",
    "XTMLIds",
    "assign_call_ids",
    "display_text",
    "image_parts",
    "image_prompt",
    "render",
    "render_partial",
]
