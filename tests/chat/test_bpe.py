"""The trainer of small vocabularies."""

import json
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from moonlet.chat.bpe import tokenizer_config, tokenizer_files, train_bpe
from moonlet.chat.render import render
from moonlet.chat.tokenizer import Tokenizer
from moonlet.core.errors import ConfigError

CORPUS = [
    "the cat sat on the mat and the hat\n" * 5,
    "123+456=579, 12 + 34 = 46, year 2026 and \uff12\uff10\uff12\uff16\n" * 20,
    "naïve café 中文文本 中文\r\n\r\n    indented",
]


def test_the_most_frequent_pair_comes_first_and_ties_go_to_the_smaller_bytes() -> None:
    ranks = train_bpe(["abab abab", "cd"], 259)
    assert [token for token, rank in ranks.items() if rank >= 256] == [b"ab", b"abab", b" abab"]
    assert [token for token, rank in train_bpe(["zy dc"], 257).items() if rank == 256] == [b" d"]


def test_ranks_are_contiguous_and_start_with_the_single_bytes() -> None:
    ranks = train_bpe(CORPUS, 300)
    assert sorted(ranks.values()) == list(range(300))
    assert [ranks[bytes((value,))] for value in range(256)] == list(range(256))


def multi_digit(ranks: dict[bytes, int]) -> list[str]:
    texts = [token.decode("utf-8", "replace") for token in ranks]
    return [text for text in texts if regex.search(r"\p{N}", text) and len(text) > 1]


def test_no_rank_holds_several_digits_unless_asked_for() -> None:
    ranks = train_bpe(CORPUS, 300)
    assert not multi_digit(ranks)
    assert "123" in multi_digit(train_bpe(CORPUS, 300, forbid_digit_merges=False))
    tokenizer = Tokenizer(ranks)
    assert tokenizer.encode("20263") == [ranks[digit.encode()] for digit in "20263"]


def test_merges_do_not_cross_pieces() -> None:
    ranks = train_bpe(["go! go! go! go! go!"], 258)
    assert {b"go", b" go"} <= ranks.keys()
    assert b"go!" not in ranks


def test_control_segments_are_not_learned_and_segments_count_like_text() -> None:
    messages = [{"role": "user", "content": "hello hello hello"}] * 5
    segments = render(messages)
    ranks = train_bpe(segments, 286)
    assert not [token for token in ranks if b"<|" in token or b"|>" in token]
    assert b"message" in ranks
    plain = train_bpe([s.text for s in segments if not s.allow_special], 286)
    assert ranks == plain


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_a_trained_vocabulary_round_trips_any_text(text: str) -> None:
    try:
        ranks = train_bpe([text, text], 270)
    except ConfigError:
        ranks = train_bpe([*CORPUS, text], 270)
    tokenizer = Tokenizer(ranks)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_encoder_merges_as_the_trainer_did() -> None:
    # after all merges of a one-word corpus the word is a single token
    ranks = train_bpe(["mississippi"], 256 + 8)
    assert len(Tokenizer(ranks).encode("mississippi")) == 1


def test_the_files_load_as_a_model_directory(tmp_path: Path) -> None:
    ranks = train_bpe(CORPUS, 280)
    for name, content in tokenizer_files(ranks).items():
        (tmp_path / name).write_bytes(content)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.vocab_size == 280 + 256
    assert tokenizer.special_ids == Tokenizer(ranks).special_ids
    assert tokenizer.special_ids.end_of_msg == 282
    assert tokenizer.id("<|reserved_token_290|>") == 290
    assert tokenizer.is_skippable(282)
    assert not tokenizer.is_skippable(tokenizer.id("<|open|>"))
    for text in CORPUS:
        assert tokenizer.encode(text) == Tokenizer(ranks).encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_config_names_all_control_tokens() -> None:
    config = json.loads(json.dumps(tokenizer_config(1280)))
    decoder = config["added_tokens_decoder"]
    assert list(decoder) == [str(token_id) for token_id in range(1280, 1536)]
    assert decoder["1282"]["content"] == "<|end_of_msg|>"
    assert [key for key, entry in decoder.items() if not entry["special"]] == [
        "1283",
        "1284",
        "1285",
    ]
    assert config["eos_token"] == "[EOS]"


def test_too_small_a_corpus_or_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="only 258 of 300 ranks"):
        train_bpe(["abc"], 300)
    with pytest.raises(ConfigError, match="need 256"):
        train_bpe(CORPUS, 255)


def test_progress_counts_up_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    train_bpe(CORPUS, 260, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(257, 260), (258, 260), (259, 260), (260, 260)]
