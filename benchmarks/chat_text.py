"""Speed of the text side: loading, rendering, encoding, decoding, vocabulary training.

    python benchmarks/chat_text.py VOCABULARY_DIR > result.json

Uses one thread and no model; VOCABULARY_DIR holds a tiktoken.model. The corpus is the source and
the help topics of the running Python.
"""

import json
import platform
import pydoc_data.topics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from moonlet.chat import Tokenizer, render
from moonlet.chat.bpe import train_bpe

Value = TypeVar("Value")

MESSAGES = [
    {"role": "user", "content": "What is 123+456?"},
    {"role": "assistant", "content": "579", "reasoning_content": "add"},
] * 20


def best_of(repeats: int, call: Callable[[], Value]) -> tuple[float, Value]:
    """Return the shortest of several run times in seconds, and the value."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        value = call()
        times.append(time.perf_counter() - start)
    return min(times), value


def main(directory: Path) -> None:
    """Measure and write one JSON object to stdout."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:105]
    corpus = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    corpus += pydoc_data.topics.topics.values()
    text = "".join(corpus)
    load_s, tokenizer = best_of(3, lambda: Tokenizer.from_dir(directory))
    render_s, segments = best_of(50, lambda: render(MESSAGES, thinking_effort="max"))
    encode_s, ids = best_of(50, lambda: tokenizer.encode_segments(segments))
    text_s, text_ids = best_of(3, lambda: tokenizer.encode(text))
    decode_s, _ = best_of(3, lambda: tokenizer.decode(text_ids))
    train_s, _ = best_of(1, lambda: train_bpe(corpus, 1280))
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "load_s": load_s,
        "conversation": {"segments": len(segments), "ids": len(ids)},
        "render_ms": render_s * 1e3,
        "encode_conversation_ms": encode_s * 1e3,
        "encode_text_mchars_per_s": len(text) / text_s / 1e6,
        "decode_mids_per_s": len(text_ids) / decode_s / 1e6,
        "train_corpus_mchars": len(text) / 1e6,
        "train_1280_ranks_s": train_s,
    }
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
