"""Random well-formed conversations."""

import json
from typing import Any

from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NAME = st.sampled_from(["f", "get_weather", 'quote"&'])


def call(name: str, arguments: Any = "{}", id: str | None = "a") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    ids = {} if id is None else {"id": id}
    return {**ids, "type": "function", "function": function}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
CALLS = st.builds(call, NAME, OBJECTS.map(json.dumps))


def _assistant(content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [{**item, "id": f"c{i}"} for i, item in enumerate(calls)]
    return message


ASSISTANT = st.builds(_assistant, TEXT, TEXT, st.lists(CALLS, max_size=2))


@st.composite
def _turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(TEXT)}]
    message = draw(ASSISTANT)
    messages.append(message)
    results = [
        {"role": "tool", "content": draw(TEXT), "tool_call_id": item["id"]}
        for item in message.get("tool_calls", ())
    ]
    return messages + draw(st.permutations(results))


CONVERSATIONS = st.lists(_turns(), min_size=1, max_size=3).map(
    lambda turns: [message for turn in turns for message in turn]
)
