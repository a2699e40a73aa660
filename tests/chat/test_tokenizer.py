"""Encoding, decoding and vocabulary files."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonlet.chat.bpe import tokenizer_files, train_bpe
from moonlet.chat.segments import Segment
from moonlet.chat.special_tokens import ABSENT, k3_table
from moonlet.chat.tokenizer import Tokenizer, split_long_text
from moonlet.chat.vocabulary import PATTERN, read_ranks
from moonlet.core.errors import CheckpointError, RequestError
from tests.chat.text_vectors import golden_tokenizer, read_json, read_lines, vector_path
from tests.golden_data import count_vectors

BYTES = {bytes((value,)): value for value in range(256)}
CONTROL_NAMES = list(k3_table(1000).ids)


def small_tokenizer() -> Tokenizer:
    return Tokenizer(BYTES, k3_table(256))


# ---- golden vectors -----------------------------------------------------------------------------


def test_ids_equal_the_published_tokenizer() -> None:
    tokenizer = golden_tokenizer()
    rows = read_lines("tokenize.jsonl")
    for row in rows:
        ids = tokenizer.encode(row["text"])
        assert ids == row["ids"], row["text"]
        assert max(ids, default=0) < tokenizer.num_ranks
        assert tokenizer.decode(ids) == row["text"]
        special = row.get("ids_allow_special", row["ids"])
        assert tokenizer.encode(row["text"], allow_special=True) == special, row["text"]
    assert len(rows) > 200
    count_vectors(len(rows))


def test_long_text_is_cut_as_the_published_tokenizer_cuts_it() -> None:
    tokenizer = golden_tokenizer()
    rows = read_json("tokenize_long.json")
    for row in rows:
        text = eval(row["recipe"])
        ids = tokenizer.encode(text)
        digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        assert (len(text), len(ids)) == (row["chars"], row["n_ids"]), row["recipe"]
        assert digest == row["sha256_of_comma_joined_ids"], row["recipe"]
        assert ids[:8] == row["first_ids"]
        assert ids[-8:] == row["last_ids"]
    assert rows
    count_vectors(len(rows))


def test_token_bytes_and_streamed_text_equal_the_published_tokenizer() -> None:
    tokenizer = golden_tokenizer()
    data = read_json("detokenize.json")
    for row in data["incremental_utf8"]:
        assert tokenizer.encode(row["text"]) == row["ids"]
        assert [list(tokenizer.token_bytes(i)) for i in row["ids"]] == row["bytes_per_id"]
        decoder = tokenizer.stream_decoder()
        pieces = [decoder.push(token_id) for token_id in row["ids"]]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == row["text"]
        assert decoder.flush() == ""
    for row in data["single_byte_tokens"]:
        assert tokenizer.token_bytes(row["id"]) == bytes((row["byte"],))
    count_vectors(len(data["incremental_utf8"]) + len(data["single_byte_tokens"]))


def test_pattern_and_control_names_equal_the_published_ones() -> None:
    assert vector_path("pattern.txt").read_text(encoding="utf-8") == PATTERN + "\n"
    special = read_json("special_tokens.json")
    tokenizer = golden_tokenizer()
    assert tokenizer.num_ranks == special["base_vocab"]
    assert tokenizer.vocab_size == special["vocab_size"]
    for token_id in range(special["base_vocab"], special["vocab_size"]):
        reserved = special["reserved_name_format"].format(id=token_id)
        name = special["named"].get(str(token_id), reserved)
        assert tokenizer.name(token_id) == name
        assert tokenizer.id(name) == token_id
        is_kept = token_id in special["not_flagged_special"]
        assert tokenizer.is_skippable(token_id) != is_kept
    ids = tokenizer.special_ids
    assert (ids.bos, ids.eos, ids.end_of_msg) == (
        special["bos"],
        special["eos_token"],
        special["generation_stop"],
    )
    assert (ids.pad, ids.media_pad) == (special["pad"], special["media_placeholder"])
    assert tokenizer.missing_xtml_names() == []
    assert tokenizer.stop_ids == {ids.end_of_msg, ids.eos, ids.eot}
    count_vectors(2)


# ---- properties ---------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


@given(TEXTS)
def test_decoding_undoes_encoding(text: str) -> None:
    for tokenizer in (golden_tokenizer(), small_tokenizer()):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


@given(TEXTS)
def test_streamed_text_equals_decoded_text_at_every_cut(text: str) -> None:
    tokenizer = small_tokenizer()
    decoder = tokenizer.stream_decoder()
    seen = ""
    for token_id in tokenizer.encode(text):
        seen += decoder.push(token_id)
        assert text.startswith(seen)
    assert seen + decoder.flush() == text


@given(st.lists(st.integers(0, 511), max_size=40))
def test_any_ids_stream_to_the_text_that_decoding_gives(ids: list[int]) -> None:
    tokenizer = small_tokenizer()
    whole = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    assert tokenizer.decode(ids) == whole


@given(TEXTS, st.sampled_from(CONTROL_NAMES), TEXTS)
def test_ordinary_text_never_yields_a_control_id(before: str, name: str, after: str) -> None:
    for tokenizer in (golden_tokenizer(), Tokenizer(BYTES, {n: i for i, n in _numbered()})):
        ids = tokenizer.encode(before + name + after)
        assert max(ids) < tokenizer.num_ranks
        assert tokenizer.decode(ids) == before + name + after


def _numbered() -> list[tuple[int, str]]:
    return list(enumerate(CONTROL_NAMES, start=256))


@pytest.mark.parametrize("make", [golden_tokenizer, small_tokenizer])
def test_each_control_name_becomes_its_id_only_where_allowed(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for token_id in range(tokenizer.num_ranks, tokenizer.vocab_size):
        name = tokenizer.name(token_id)
        assert tokenizer.encode(name, allow_special=True) == [token_id]
        assert max(tokenizer.encode(name)) < tokenizer.num_ranks
        segments = [Segment(name), Segment(name, allow_special=True)]
        assert tokenizer.encode_segments(segments) == [*tokenizer.encode(name), token_id]


@given(
    st.lists(
        st.tuples(st.sampled_from("a \u3000中\x1f"), st.sampled_from([1, 24_999, 25_000, 60_000])),
        max_size=8,
    )
)
def test_cuts_keep_the_text_and_bound_every_run(runs: list[tuple[str, int]]) -> None:
    text = "".join(char * length for char, length in runs)
    pieces = list(split_long_text(text))
    assert "".join(pieces) == text
    for piece in pieces:
        assert len(piece) <= 400_000
        assert all(len(run) <= 25_000 for run in re.findall(r"\s+|\S+", piece))


def test_run_boundaries_follow_str_isspace() -> None:
    every = "".join(map(chr, range(0x110000)))
    assert set(re.findall(r"\s", every)) == {char for char in every if char.isspace()}


# ---- decoding rules -----------------------------------------------------------------------------


def test_half_a_character_is_held_and_ends_as_replacement() -> None:
    tokenizer = small_tokenizer()
    decoder = tokenizer.stream_decoder()
    assert [decoder.push(byte) for byte in "é".encode()] == ["", "é"]
    assert decoder.push(0xE4) == ""
    assert decoder.push(tokenizer.id("<|sep|>")) == "\ufffd<|sep|>"
    assert decoder.push(0xE4) == ""
    assert decoder.push(ord("x")) == "\ufffdx"
    assert decoder.push(0xE4) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_skipping_special_tokens_keeps_the_markup() -> None:
    tokenizer = small_tokenizer()
    text = "<|open|>think<|sep|>a<|close|>think<|sep|><|end_of_msg|>[EOS]"
    ids = tokenizer.encode(text, allow_special=True)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=True) == (
        "<|open|>think<|sep|>a<|close|>think<|sep|>"
    )


@pytest.mark.parametrize("token_id", [-1, 512, 10**9])
def test_an_id_outside_the_vocabulary_is_a_request_error(token_id: int) -> None:
    with pytest.raises(RequestError, match=rf"token id {token_id} .* 512 tokens"):
        small_tokenizer().decode([token_id])


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


# ---- vocabulary files ---------------------------------------------------------------------------


def write_dir(path: Path, *, config: object = None, ranks: bytes | None = None) -> Path:
    lines = b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in BYTES.items())
    (path / "tiktoken.model").write_bytes(lines if ranks is None else ranks)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return path


def test_small_vocabularies_take_ids_from_their_own_size(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_dir(tmp_path))
    ids = tokenizer.special_ids
    assert (ids.bos, ids.end_of_msg, ids.media_pad, ids.pad) == (256, 258, 277, 511)
    assert tokenizer.id("<|reserved_token_264|>") == 264
    assert tokenizer.encode("<|open|>", allow_special=True) == [259]


def test_names_come_from_the_checkpoint(tmp_path: Path) -> None:
    names = {256: "[BOS]", 257: "[EOS]", 258: "<|im_end|>", 259: "<|im_user|>"}
    config = {"added_tokens_decoder": {str(i): {"content": n} for i, n in names.items()}}
    tokenizer = Tokenizer.from_dir(write_dir(tmp_path, config=config))
    assert tokenizer.encode("<|im_user|>", allow_special=True) == [259]
    assert tokenizer.special_ids.open == ABSENT
    assert tokenizer.stop_ids == {257, 258}
    assert tokenizer.missing_xtml_names() == [
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "<|end_of_msg|>",
    ]
    assert tokenizer.name(260) == "<|reserved_token_260|>"
    assert tokenizer.vocab_size == 512


def test_names_may_lie_behind_the_reserved_ids(tmp_path: Path) -> None:
    config = added((256, {"content": "[BOS]"}), (10**9, {"content": "<|far|>"}))
    tokenizer = Tokenizer.from_dir(write_dir(tmp_path, config=config))
    assert tokenizer.encode("<|far|>", allow_special=True) == [10**9]
    with pytest.raises(RequestError):
        tokenizer.decode([600])


def added(*entries: tuple[int, object]) -> dict[str, object]:
    return {"added_tokens_decoder": {str(key): value for key, value in entries}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "tokenizer_config.json is not valid JSON"),
        ([], "want a JSON object"),
        (added((12, {"content": "[BOS]"})), "inside the 256 merge ranks"),
        (added((256, {"content": "a"}), (257, {"content": "a"})), "two ids"),
        (added((256, {"content": ""})), "malformed added token"),
        (added((256, "x")), "malformed added token"),
        ({"added_tokens_decoder": ["x"]}, "not an object"),
    ],
)
def test_malformed_control_tables_are_refused(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_dir(write_dir(tmp_path, config=config))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (b"IQ== 0\nIg==\n", "line 2"),
        (b"I! 0\n", "line 1"),
        (b"IQ== x\n", "line 1"),
        (b"IQ== 0\nIg== 2\n", "not 0..1"),
        (b"IQ== 0\nIg== 1\n", "lack the single bytes"),
    ],
)
def test_malformed_rank_files_are_refused(tmp_path: Path, ranks: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_dir(write_dir(tmp_path, ranks=ranks))


def test_a_directory_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tiktoken.model or tokenizer.json"):
        Tokenizer.from_dir(tmp_path)


def test_control_ids_may_not_overlap_the_ranks() -> None:
    for special in ({"[BOS]": 255}, {"[BOS]": 256, "[EOS]": 256}):
        with pytest.raises(CheckpointError, match="control ids"):
            Tokenizer(BYTES, special)


# ---- tokenizer.json -----------------------------------------------------------------------------

CORPUS = ["the cat and the hat, the bat and the mat", "naïve café 中文 text\n\n  indented"] * 3


def hugging_face_file(ranks: dict[bytes, int]) -> dict[str, object]:
    """Write ranks the way the converters do: printable byte stand-ins, merges in rank order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    char = {b: chr(b if b in printable else next(rest)) for b in range(256)}
    text = {token: "".join(char[b] for b in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        splits = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += [[text[a], text[b]] for a, b in splits]
    return {
        "model": {
            "type": "BPE",
            "vocab": {text[token]: rank for token, rank in ranks.items()} | {"<|open|>": 299},
            "merges": merges,
        },
        "added_tokens": [{"id": 299, "content": "<|open|>"}],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": PATTERN}},
    }


def test_a_tokenizer_json_from_the_same_ranks_gives_the_same_ids(tmp_path: Path) -> None:
    ranks = train_bpe(CORPUS, 280)
    (tmp_path / "tokenizer.json").write_text(json.dumps(hugging_face_file(ranks)))
    for text in CORPUS:
        expected = Tokenizer(ranks).encode(text)
        assert Tokenizer.from_dir(tmp_path).encode(text) == expected
    (tmp_path / "tiktoken.model").write_bytes(tokenizer_files(ranks)["tiktoken.model"])
    assert read_ranks(tmp_path / "tiktoken.model") == ranks


def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    good = hugging_face_file(train_bpe(CORPUS, 280))
    model = good["model"]
    assert isinstance(model, dict)
    first, *others = model["merges"]
    bad = [
        (good | {"model": model | {"type": "Unigram"}}, "want BPE"),
        (good | {"pre_tokenizer": {"type": "ByteLevel"}}, "pre_tokenizer is not K3's"),
        (good | {"model": model | {"merges": [*others, first]}}, "merge order"),
        (good | {"model": model | {"vocab": {"\u4e2d": 0}}}, "not byte-level"),
    ]
    for content, message in bad:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.from_dir(tmp_path)
