"""Text in and out: tokenizer, XTML rendering and parsing; no torch and no engine needed."""

from moonlet.chat.call_ids import count_tool_calls, tool_call_id
from moonlet.chat.content import image_parts, image_prompt
from moonlet.chat.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    IncompleteCall,
    ParsedMessage,
    ReasoningDelta,
    ReasoningEnd,
    ToolCall,
)
from moonlet.chat.parser import Parser
from moonlet.chat.render import PartialPrompt, render, render_partial
from moonlet.chat.segments import Segment, display_text
from moonlet.chat.special_tokens import XTMLIds
from moonlet.chat.stop import StopMatch, StopStrings
from moonlet.chat.text_adapter import TextAdapter
from moonlet.chat.tokenizer import StreamDecoder, Tokenizer
from moonlet.chat.tool_results import assign_call_ids

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ContentDelta",
    "Event",
    "IncompleteCall",
    "ParsedMessage",
    "Parser",
    "PartialPrompt",
    "ReasoningDelta",
    "ReasoningEnd",
    "Segment",
    "StopMatch",
    "StopStrings",
    "StreamDecoder",
    "TextAdapter",
    "Tokenizer",
    "ToolCall",
    "XTMLIds",
    "assign_call_ids",
    "count_tool_calls",
    "display_text",
    "image_parts",
    "image_prompt",
    "render",
    "render_partial",
    "tool_call_id",
]
