"""Tool-call ids."""

from typing import Any

import pytest

from moonlet.chat.call_ids import count_tool_calls, tool_call_id
from moonlet.core.errors import ConfigError

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [{"id": "x"}, {"id": "y"}]},
    {"role": "tool", "tool_call_id": "x", "content": "1"},
    {"role": "assistant", "content": "done", "tool_calls": None},
    {"role": "assistant", "tool_calls": [{"id": "z"}]},
]


def test_numbers_run_over_the_whole_history() -> None:
    num_before = count_tool_calls(HISTORY)
    assert num_before == 3
    assert [tool_call_id("f", i, num_before) for i in range(2)] == ["f_3", "f_4"]
    assert tool_call_id("f", 0) == "f_0"


def test_other_styles() -> None:
    assert tool_call_id("f", 1, 2, "colon") == "f:3"
    assert tool_call_id("f", 1, 2, "functions") == "functions.f:3"
    style: Any = "hex"
    with pytest.raises(ConfigError, match="hex"):
        tool_call_id("f", 0, 0, style)
