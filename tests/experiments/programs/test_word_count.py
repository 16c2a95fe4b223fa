import collections
import re

import pytest

from experiments.programs.word_count import count_words, map_reduce, pages, words

TEXTS = ["a rose is a rose", "is a rose", "", "Roses are RED"]


def test_the_counts_of_all_pages_are_those_of_a_counter(launcher):
    counts = count_words(launcher, mappers=3, reducers=2)
    text = "\n".join(pages()).lower()
    assert counts == collections.Counter(re.findall(r"[a-z]+", text))
    assert counts["the"] > 100
    assert counts["license"] > 10


@pytest.mark.parametrize(("mappers", "reducers"), [(1, 1), (2, 5), (6, 3)])
def test_each_key_is_reduced_in_one_place(mappers, reducers):
    found = map_reduce("threads", TEXTS, words, sum, mappers=mappers, reducers=reducers)
    assert len(found) == reducers
    keys = [key for share in found for key in share]
    assert sorted(keys) == ["a", "are", "is", "red", "rose", "roses"]
    assert {k: v for share in found for k, v in share.items()} == {
        "a": 3, "rose": 3, "is": 2, "roses": 1, "are": 1, "red": 1,
    }  # fmt: skip


def test_another_job_is_two_other_functions():
    def lengths(text):
        yield from ((word[0], len(word)) for word in text.lower().split())

    found = map_reduce("threads", TEXTS, lengths, max)
    assert {k: v for share in found for k, v in share.items()} == {
        "a": 3, "r": 5, "i": 2,
    }  # fmt: skip


def test_a_text_that_cannot_be_mapped_fails_the_run():
    def fail(text):
        raise ValueError(f"no words in {text!r}")

    with pytest.raises(Exception, match="no words in 'a rose"):
        map_reduce("threads", TEXTS[:1], fail, sum)
