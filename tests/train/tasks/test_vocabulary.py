import pytest

from moonlet.chat.bpe import tokenizer_files
from moonlet.chat.tokenizer import Tokenizer
from moonlet.train.tasks.mixture import make_sample
from moonlet.train.tasks.source import TaskSource
from moonlet.train.tasks.tokenizer_corpus import NUM_RANKS, render_sample, train_ranks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, data in tokenizer_files(train_ranks(num_samples=2000)).items():
        (directory / name).write_bytes(data)
    return Tokenizer.from_dir(directory)


def test_ranks_are_reproducible():
    assert train_ranks(600, num_samples=50) == train_ranks(600, num_samples=50)


def test_digits_stay_single(tokenizer):
    assert len(tokenizer.encode("1234567890")) == 10
    assert tokenizer.num_ranks == NUM_RANKS


@pytest.mark.parametrize("word", ["Kalumori", "trosabee", "harbor", "kitchen", "zimzam", "Paris"])
def test_an_open_word_has_the_same_tokens_in_every_place(tokenizer, word):
    alone = tokenizer.encode(word)
    for before in (" ", "_", '"', "'", "-"):
        assert tokenizer.encode(before + word) == tokenizer.encode(before) + alone
    assert tokenizer.encode(f"get_{word} ")[-len(alone) - 1 : -1] == alone


def test_words_of_every_prompt_are_single_tokens(tokenizer):
    for text in (" role", "message", "assistant", "response", "argument", " guides", " supported",
                 "`thinking",
                 "_effort", "description", "parameters", '":{"', "required"):  # fmt: skip
        assert len(tokenizer.encode(text)) == 1, text


def test_the_source_masks_what_the_prompt_gives(tokenizer):
    source = TaskSource(tokenizer)
    total = supervised = 0
    for index in range(300):
        ids, mask = source(1, index, 1.0)
        assert (ids, mask) == source(1, index, 1.0)
        assert len(ids) == len(mask) <= 1500
        sample = make_sample(1, index)
        text = "".join(s.text for s in render_sample(sample) if s.generated)
        assert tokenizer.decode(i for i, m in zip(ids, mask, strict=True) if m) == text
        assert mask[-1]
        assert ids[-1] == tokenizer.special_ids.end_of_msg
        total += len(ids)
        supervised += sum(mask)
    assert 0.35 < supervised / total < 0.5
    assert total / 300 < 480
