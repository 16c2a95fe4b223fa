import numpy as np
import pytest
import tokenizers

from experiments.language import tokens
from replicator.errors import ArgumentError

TEXTS = ["the cat sat on the mat\n" * 9, "Ünïcode, \tspaces  and\n\nlines 😀"]


@pytest.fixture(scope="module")
def tokenizer():
    return tokens.train_tokenizer(TEXTS, 280)


def test_what_is_decoded_is_what_was_encoded(tokenizer):
    other = "never seen: ∀x∈√2\0\n"
    found = tokens.encode(tokenizer, [*TEXTS, other])
    end = tokens.end_of_text(tokenizer)
    starts = np.flatnonzero(found == end)

    assert len(starts) == 3
    assert starts[0] == 0
    parts = np.split(found, starts[1:])
    decoded = [tokenizer.decode(part[1:].tolist()) for part in parts]
    assert decoded == [*TEXTS, other]


def test_frequent_text_takes_fewer_tokens_than_bytes(tokenizer):
    assert len(tokens.encode(tokenizer, TEXTS[:1])) < len(TEXTS[0]) / 3


def test_the_same_text_trains_the_same_tokenizer(tokenizer):
    assert tokens.train_tokenizer(TEXTS, 280).to_str() == tokenizer.to_str()


def test_a_file_gives_the_tokenizer_back(tokenizer, tmp_path):
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.no_truncation()
    again = tokens.read_tokenizer(tmp_path / "tokenizer.json")
    assert again.to_str() == tokenizer.to_str()


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ArgumentError, match=r"`--vocabulary` must be at least 257"):
        tokens.train_tokenizer(TEXTS, 256)


def test_a_tokenizer_of_another_size_is_refused(tokenizer):
    with pytest.raises(ArgumentError, match=r"must have 300 tokens.*, got 280"):
        tokens.check_vocabulary(tokenizer, 300)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"^`--tokenizer` must hold a tokenizer"):
        tokens.read_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_an_end_of_text_is_refused():
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(ArgumentError, match=r"must have one of <.endoftext.>"):
        tokens.encode(other, TEXTS)
