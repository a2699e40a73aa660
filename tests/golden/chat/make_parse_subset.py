"""Cut the committed parser vectors out of the full golden set.

    python tests/golden/chat/make_parse_subset.py FULL_SET/chat

Writes parse.jsonl, parse_tokens.jsonl and parse_vocabulary.json beside this script, see
README-parse.md.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TEXT_KEYS = ("id", "group", "mode", "engine_finish", "raw", "token_ids", "expected")
TOKEN_KEYS = ("id", "mode", "token_ids", "expected")
CONTROLS = {
    "bos": "[BOS]",
    "eos": "[EOS]",
    "eot": "[EOT]",
    "end_of_msg": "<|end_of_msg|>",
    "open": "<|open|>",
    "close": "<|close|>",
    "sep": "<|sep|>",
    "media_begin": "<|media_begin|>",
    "media_content": "<|media_content|>",
    "media_end": "<|media_end|>",
    "media_pad": "<|media_pad|>",
    "pad": "[PAD]",
}


def read_vectors(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{key: json.loads(line)[key] for key in keys} for line in lines]


def write_vectors(path: Path, vectors: list[dict[str, Any]]) -> None:
    lines = [json.dumps(vector, ensure_ascii=False) for vector in vectors]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(source: Path) -> None:
    texts = read_vectors(source / "parse.jsonl", TEXT_KEYS)
    tokens = read_vectors(source / "parse_tokens.jsonl", TOKEN_KEYS)
    specials = json.loads((source / "special_tokens.json").read_text(encoding="utf-8"))
    ids_by_name = {name: int(token_id) for token_id, name in specials["named"].items()}
    base = specials["base_vocab"]
    used = {i for vector in texts + tokens for i in vector["token_ids"] if i < base}
    ranks = {}
    for line in (source / "tiktoken.model").read_bytes().splitlines():
        encoded, rank = line.split()
        if int(rank) in used:
            ranks[int(rank)] = base64.b64decode(encoded, validate=True)
    vocabulary = {
        "num_ranks": base,
        "special_ids": {field: ids_by_name[name] for field, name in CONTROLS.items()},
        "token_bytes_base64": {
            str(rank): base64.b64encode(ranks[rank]).decode() for rank in sorted(used)
        },
    }
    write_vectors(HERE / "parse.jsonl", texts)
    write_vectors(HERE / "parse_tokens.jsonl", tokens)
    text = json.dumps(vocabulary, indent=0)
    (HERE / "parse_vocabulary.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
