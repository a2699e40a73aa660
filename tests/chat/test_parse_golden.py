"""Golden vectors of the output parser, whole and in pieces."""

import base64
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.chat.parser import Parser
from moonlet.chat.text_adapter import TextAdapter
from tests import golden_data
from tests.chat import parsing

CHAT = golden_data.golden_dir("chat")
TABLE = parsing.GoldenTable(
    Path(__file__).parent.parent / "golden" / "chat" / "parse_vocabulary.json"
)
NUM_RANDOM_SPLITS = 8


@functools.cache
def read(name: str) -> list[dict[str, Any]]:
    path = golden_data.require(CHAT / name)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("tool_stream", ["incremental", "atomic"])
def test_text_vectors_in_every_split(tool_stream: Any) -> None:
    vectors = read("parse.jsonl")
    rng = random.Random(1)
    for vector in vectors:
        raw = vector["raw"]
        splits = [[raw], list(parsing.one_by_one(raw))]
        splits += [list(parsing.at_random(raw, rng)) for _ in range(NUM_RANDOM_SPLITS)]
        for chunks in splits:
            adapter = TextAdapter(vector["mode"], tool_stream=tool_stream)
            message, events = parsing.run(adapter, chunks, vector["engine_finish"])
            assert parsing.as_golden(message) == vector["expected"], (vector["id"], chunks)
            parsing.check_replay(events, message, tool_stream)
    golden_data.count_vectors(len(vectors) if tool_stream == "incremental" else 0)


@pytest.mark.parametrize("tool_stream", ["incremental", "atomic"])
@pytest.mark.parametrize("name", ["parse.jsonl", "parse_tokens.jsonl"])
def test_id_vectors_in_every_split(name: str, tool_stream: Any) -> None:
    vectors = read(name)
    rng = random.Random(2)
    for vector in vectors:
        ids = vector["token_ids"]
        splits = [[ids], list(parsing.one_by_one(ids))]
        splits += [list(parsing.at_random(ids, rng)) for _ in range(NUM_RANDOM_SPLITS)]
        for chunks in splits:
            parser = Parser(TABLE, vector["mode"], tool_stream=tool_stream)
            message, events = parsing.run(parser, chunks, vector.get("engine_finish", "stop"))
            found = parsing.as_golden(message)
            if "finish_reason" not in vector["expected"]:
                del found["finish_reason"]
            assert found == vector["expected"], (vector["id"], chunks)
            parsing.check_replay(events, message, tool_stream)
    # the same vectors as text are counted above
    is_new = name == "parse_tokens.jsonl" and tool_stream == "incremental"
    golden_data.count_vectors(len(vectors) if is_new else 0)


@given(data=st.data())
@settings(max_examples=1000)
def test_thousand_random_splits_replay_to_the_same_message(data: st.DataObject) -> None:
    vector = data.draw(st.sampled_from(read("parse.jsonl")))
    ids = vector["token_ids"]
    cuts = data.draw(st.lists(st.integers(0, len(ids))))
    parser = Parser(TABLE, vector["mode"])
    message, events = parsing.run(parser, parsing.split_at(ids, cuts), vector["engine_finish"])
    assert parsing.as_golden(message) == vector["expected"]
    parsing.check_replay(events, message, "incremental")


def test_token_table_is_that_of_the_real_vocabulary() -> None:
    path = golden_data.require(CHAT / "tiktoken.model")
    wanted = TABLE.bytes_by_id
    found = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        if int(rank) in wanted:
            found[int(rank)] = base64.b64decode(token)
    assert found == wanted
