"""Golden vectors of the tokenizer and the renderer, and the vocabulary that goes with them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from moonlet.chat.special_tokens import k3_table
from moonlet.chat.tokenizer import Tokenizer
from moonlet.chat.vocabulary import read_ranks
from tests.golden_data import golden_dir, require


def vector_path(name: str) -> Path:
    return require(golden_dir("chat") / name)


def read_lines(name: str) -> list[dict[str, Any]]:
    lines = vector_path(name).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def read_json(name: str) -> Any:
    return json.loads(vector_path(name).read_text(encoding="utf-8"))


def golden_tokenizer() -> Tokenizer:
    """The published vocabulary, or with the committed subset the slice that its ids belong to."""
    whole = golden_dir("chat") / "tiktoken.model"
    return _load(whole if whole.exists() else vector_path("slice.tiktoken"))


@cache
def _load(path: Path) -> Tokenizer:
    ranks = read_ranks(path)
    return Tokenizer(ranks, k3_table(len(ranks)))
