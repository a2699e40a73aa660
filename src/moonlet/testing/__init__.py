"""Stand-ins for tests: tiny models, a scripted model, a byte tokenizer, closeness checks."""

from moonlet.testing.closeness import assert_close, assert_same_choice, error_ratio
from moonlet.testing.scripted import Script, ScriptedModel, count_up, reply_with
from moonlet.testing.tiny import tiny_config, tiny_model
from moonlet.testing.tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "Script",
    "ScriptedModel",
    "assert_close",
    "assert_same_choice",
    "count_up",
    "error_ratio",
    "reply_with",
    "tiny_config",
    "tiny_model",
]
