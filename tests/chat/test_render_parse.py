"""What the renderer writes for an assistant turn, the parser reads back."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.chat import Parser, Tokenizer, render
from tests.chat import parsing

TOKENIZER = Tokenizer({bytes((value,)): value for value in range(256)})
# marker spellings are the hard part of any text; surrogates have no bytes
TEXT = st.lists(
    st.one_of(
        st.sampled_from([parsing.O, parsing.C, parsing.S, parsing.END, "argument", "think", '"']),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    ),
    max_size=5,
).map("".join)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
).filter(lambda value: "Infinity" not in json.dumps(value))
CALLS = st.tuples(TEXT.filter(bool), st.dictionaries(TEXT, VALUES, max_size=3))


@given(
    reasoning=TEXT.filter(lambda text: text.strip()),
    content=TEXT,
    calls=st.lists(CALLS, max_size=3),
    is_thinking=st.booleans(),
)
@settings(max_examples=300)
def test_rendered_turn_parses_to_the_same_message(
    reasoning: str, content: str, calls: list[tuple[str, Any]], is_thinking: bool
) -> None:
    turn = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ],
    }
    messages = [{"role": "user", "content": "hi"}, turn]
    segments = render(messages, thinking=is_thinking, add_generation_prompt=False)
    ids, is_generated = TOKENIZER.encode_with_mask(segments)
    written = [i for i, generated in zip(ids, is_generated, strict=True) if generated]
    parser = Parser(TOKENIZER, "thinking" if is_thinking else "instruct")
    message, events = parsing.run(parser, parsing.one_by_one(written))
    parsing.check_replay(events, message, "incremental")
    assert message.reasoning_content == (reasoning if is_thinking else None)
    assert message.content == content
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == calls
    assert message.ended
    assert message.flags == ()
