import numpy as np
import pytest

from replicator.rpc.answers import Answer
from replicator.rpc.server.reply_cache import New, ReplyCache, Running, size_of

KEY = (b"client", 7)
ANSWER = Answer(2, "done")


def test_a_call_never_seen_is_new():
    assert ReplyCache().begin(KEY, "asker") == New()


def test_a_call_sent_again_while_it_runs_joins_it():
    cache = ReplyCache()
    cache.begin(KEY, "first")
    assert cache.begin(KEY, "second") == Running("first")
    assert cache.begin(KEY, "third") == Running("first")
    assert cache.end(KEY, ANSWER, 1) == ["second", "third"]


def test_a_call_sent_again_after_it_ran_gets_the_same_answer():
    cache = ReplyCache()
    cache.begin(KEY, "first")
    assert cache.end(KEY, ANSWER, 1) == []
    assert cache.begin(KEY, "second") is ANSWER


@pytest.mark.parametrize("other", [(b"client", 8), (b"another", 7)])
def test_other_calls_and_other_clients_are_others(other):
    cache = ReplyCache()
    cache.begin(KEY, "first")
    cache.end(KEY, ANSWER, 1)
    assert cache.begin(other, "second") == New()


def test_a_call_that_did_not_run_is_new_again():
    cache = ReplyCache()
    cache.begin(KEY, "first")
    cache.begin(KEY, "second")
    assert cache.forget(KEY) == ["second"]
    assert cache.begin(KEY, "third") == New()


def fill(cache, count, num_bytes):
    for number in range(count):
        cache.begin((b"c", number), "asker")
        cache.end((b"c", number), ANSWER, num_bytes)


def test_the_oldest_answers_are_forgotten_when_there_are_too_many():
    cache = ReplyCache(max_answers=3)
    fill(cache, 5, 0)
    kept = [cache.begin((b"c", number), "again") for number in range(5)]
    assert kept == [New(), New(), ANSWER, ANSWER, ANSWER]


def test_the_oldest_answers_are_forgotten_when_they_are_too_large():
    cache = ReplyCache(max_bytes=100)
    fill(cache, 5, 40)
    kept = [cache.begin((b"c", number), "again") for number in range(5)]
    assert kept == [New(), New(), New(), ANSWER, ANSWER]


def test_an_answer_larger_than_the_cache_is_not_kept_and_others_come_back():
    cache = ReplyCache(max_bytes=100)
    fill(cache, 1, 1000)
    assert cache.begin((b"c", 0), "again") == New()
    fill(cache, 2, 40)
    assert cache.begin((b"c", 1), "again") is ANSWER


@pytest.mark.parametrize(
    "value", [np.zeros(1000), {"a": [np.zeros(500), np.zeros(500)]}, b"x" * 8000]
)
def test_the_size_of_a_value_is_about_that_of_its_arrays(value):
    assert 8000 <= size_of(value) < 8500


def test_the_size_of_what_is_not_known_is_small():
    assert size_of(object()) == size_of(None) == 64
