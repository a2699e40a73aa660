"""Make the committed share of the tokenizer and rendering vectors from the full set.

    python tests/golden/chat/make_text_subset.py FULL_CHAT_DIR

The published vocabulary stays out of the repository. Encoding a text only ever looks up
substrings of its pieces, so the ranks found among the substrings of the vectors' texts, renumbered
in order, encode those texts as the whole vocabulary does. Expected ids are renumbered alike.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moonlet.chat.tokenizer import Tokenizer
from moonlet.chat.vocabulary import read_ranks, write_ranks

HERE = Path(__file__).parent


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")  # str.splitlines would cut at U+2028
    return [json.loads(line) for line in lines if line]


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def substrings(text: str, longest: int) -> Iterator[bytes]:
    data = text.encode()
    for start in range(len(data)):
        for end in range(start + 1, min(start + longest, len(data)) + 1):
            yield data[start:end]


def slice_ranks(ranks: dict[bytes, int], texts: Iterable[str]) -> dict[bytes, int]:
    """Return the single bytes and every rank that occurs in a text, with their old numbers."""
    longest = max(map(len, ranks))
    found = {bytes((value,)) for value in range(256)}
    for text in set(texts):
        found.update(piece for piece in substrings(text, longest) if piece in ranks)
    return {token: ranks[token] for token in sorted(found, key=ranks.__getitem__)}


def strip_rendering(row: dict[str, Any], renumber: dict[int, int]) -> dict[str, Any]:
    """Keep input, segments and ids; the rest is commentary or follows from them."""
    expected = row["expected"]
    if "error" not in expected:
        expected = {
            "segments": expected["segments"],
            "token_ids": [renumber[token_id] for token_id in expected["token_ids"]],
            **{key: expected[key] for key in ("parser_start_state",) if key in expected},
        }
    kept = {key: row[key] for key in ("id", "messages", "encoder_args")}
    return {**kept, "expected": expected}


def main(full: Path) -> None:
    tokenize = read_lines(full / "tokenize.jsonl")
    # reserved names spell their id, so the renumbered vocabulary has others
    tokenize = [row for row in tokenize if "<|reserved_token_" not in row["text"]]
    rendered = {name: read_lines(full / name) for name in ("render.jsonl", "partial.jsonl")}
    long_rows = json.loads((full / "tokenize_long.json").read_text(encoding="utf-8"))
    detokenize = json.loads((full / "detokenize.json").read_text(encoding="utf-8"))
    special = json.loads((full / "special_tokens.json").read_text(encoding="utf-8"))
    ranks = read_ranks(full / "tiktoken.model")

    texts = [row["text"] for row in tokenize + detokenize["incremental_utf8"]]
    for rows in rendered.values():
        texts += [text for row in rows for text, _ in row["expected"].get("segments", ())]
    # the long texts repeat themselves, so a stretch of each holds every token that they need
    long_texts = [eval(row["recipe"]) for row in long_rows]
    texts += [text[start : start + 600] for text in long_texts for start in (0, 24_800)]
    texts += [text[-600:] for text in long_texts]

    kept = slice_ranks(ranks, texts)
    renumber = {rank: index for index, rank in enumerate(kept.values())}
    num_ranks, num_kept = len(ranks), len(kept)
    renumber.update({num_ranks + i: num_kept + i for i in range(special["num_reserved_special"])})
    sliced = {token: renumber[rank] for token, rank in kept.items()}

    (HERE / "slice.tiktoken").write_bytes(write_ranks(sliced))
    for row in tokenize:
        for key in {"ids", "ids_allow_special"} & row.keys():
            row[key] = [renumber[token_id] for token_id in row[key]]
    write_lines(HERE / "tokenize.jsonl", tokenize)
    for name, rows in rendered.items():
        write_lines(HERE / name, [strip_rendering(row, renumber) for row in rows])
    whole = Tokenizer(ranks)
    for row, text in zip(long_rows, long_texts, strict=True):
        full_ids = whole.encode(text)
        joined = ",".join(map(str, full_ids))
        assert hashlib.sha256(joined.encode()).hexdigest() == row["sha256_of_comma_joined_ids"]
        ids = [renumber[token_id] for token_id in full_ids]
        row["sha256_of_comma_joined_ids"] = hashlib.sha256(
            ",".join(map(str, ids)).encode()
        ).hexdigest()
        row["first_ids"] = [renumber[token_id] for token_id in row["first_ids"]]
        row["last_ids"] = [renumber[token_id] for token_id in row["last_ids"]]
    long_json = json.dumps(long_rows, ensure_ascii=False, indent=1)
    (HERE / "tokenize_long.json").write_text(long_json + "\n", encoding="utf-8")
    for row in detokenize["incremental_utf8"]:
        row["ids"] = [renumber[token_id] for token_id in row["ids"]]
    for row in detokenize["single_byte_tokens"]:
        row["id"] = renumber[row["id"]]
    write_lines(HERE / "detokenize.json", [detokenize])
    special["named"] = {str(renumber[int(key)]): name for key, name in special["named"].items()}
    special["base_vocab"], special["vocab_size"] = num_kept, num_kept + 256
    special["not_flagged_special"] = [renumber[i] for i in special["not_flagged_special"]]
    for key in ("bos", "eos_token", "generation_stop", "pad", "unk", "media_placeholder"):
        special[key] = renumber[special[key]]
    write_lines(HERE / "special_tokens.json", [special])
    (HERE / "pattern.txt").write_bytes((full / "pattern.txt").read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
