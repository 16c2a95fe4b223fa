import numpy as np
import pytest

from experiments.programs.producer_consumer import Producer, find_primes


def primes_below(stop):
    return [n for n in range(2, stop) if all(n % d for d in range(2, int(n**0.5) + 1))]


def test_the_primes_are_those_of_trial_division_each_once(launcher):
    found = find_primes(launcher, producers=3, stop=5_000, chunk=300)
    assert found["primes"].tolist() == primes_below(5_000)


def test_every_range_was_searched_by_somebody_once():
    found = find_primes(producers=3, stop=10_000, chunk=64)
    assert sum(found["done_by"]) == 157
    assert len(found["done_by"]) == 3


def test_more_producers_than_ranges_leave_some_idle():
    found = find_primes(producers=5, stop=20, chunk=10)
    assert found["primes"].tolist() == [2, 3, 5, 7, 11, 13, 17, 19]
    assert sorted(found["done_by"]) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 90, 121, 997])
def test_a_range_holds_what_all_numbers_hold_there(start):
    expected = [n for n in primes_below(1100) if start <= n]
    assert Producer().primes(start, 1100).tolist() == expected
    assert np.array_equal(Producer().primes(start, start), [])
