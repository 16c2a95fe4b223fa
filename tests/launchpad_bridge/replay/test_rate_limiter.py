"""Limits of inserts and samples, as Reverb's."""

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.replay.rate_limiter import LimitedCounts


def reverb_may_insert(limiter, inserted, taken):
    """`RateLimiter::CanInsert(1)` of Reverb, for a table that removes nothing."""
    if inserted + 1 <= limiter.min_size:
        return True
    middle = limiter.samples_per_insert * limiter.min_size
    ahead = (inserted + 1) * limiter.samples_per_insert - taken
    return ahead <= middle + limiter.error


def reverb_may_sample(limiter, inserted, taken):
    """`RateLimiter::CanSample(1)` of Reverb."""
    if inserted < limiter.min_size:
        return False
    middle = limiter.samples_per_insert * limiter.min_size
    return inserted * limiter.samples_per_insert - taken - 1 >= middle - limiter.error


@pytest.mark.parametrize("ratio", [0.25, 1, 4])
@pytest.mark.parametrize("min_size", [1, 7])
def test_one_by_one_it_decides_as_reverb_does(ratio, min_size):
    error = 2.5 * max(1, ratio)
    limiter = lp.RateLimiter(min_size=min_size, samples_per_insert=ratio, error=error)
    for inserted in range(40):
        for taken in range(120):
            at = ratio * inserted - taken
            assert limiter.may_insert(1, at=at, held=inserted) == reverb_may_insert(
                limiter, inserted, taken
            )
            assert limiter.may_take(1, at=at, held=inserted) == reverb_may_sample(
                limiter, inserted, taken
            )


@pytest.mark.parametrize("seed", range(5))
def test_whoever_is_let_pass_the_bound_is_kept_and_someone_may_always_go_on(seed):
    random = np.random.default_rng(seed)
    batch, insert = (int(random.integers(1, 20)) for _ in range(2))
    ratio = float(random.choice([0.3, 1, 2.5]))
    error = max((batch + ratio * insert) / 2, ratio * (insert - 1), 1, ratio)
    limiter = lp.RateLimiter(min_size=9, samples_per_insert=ratio, error=error)
    counts = LimitedCounts(limiter)
    counts.check_sizes(batch=batch, insert=insert)
    for _ in range(2000):
        moves = []
        held = counts.inserted
        if counts.may_insert(insert, held=held):
            moves.append("insert")
        if counts.may_take(batch, held=held):
            moves.append("take")
        if random.choice(moves) == "insert":
            counts.inserted += insert
        else:
            counts.taken += batch
        at = ratio * counts.inserted - counts.taken
        assert at <= limiter.middle + error
        assert counts.taken == 0 or at >= limiter.middle - error


def test_without_a_ratio_only_min_size_holds():
    limiter = lp.RateLimiter(min_size=3)
    assert limiter.may_insert(10**9, at=0, held=10**9)
    assert not limiter.may_take(1, at=0, held=2)
    assert limiter.may_take(10**9, at=-1e12, held=3)


@pytest.mark.parametrize(("inserted", "taken"), [(100, 0), (100, 10**6), (100, 150)])
def test_counts_of_another_limiter_begin_where_neither_side_waits_for_ever(
    inserted, taken
):
    limiter = lp.RateLimiter(min_size=5, samples_per_insert=2, error=8)
    counts = LimitedCounts(limiter)
    counts.begin_with(inserted=inserted, taken=taken, start=0.0, held=50)
    assert counts.may_insert(1, held=50)
    assert counts.may_take(4, held=50)


def test_rows_that_are_being_written_count_for_inserts_alone():
    limiter = lp.RateLimiter(min_size=1, samples_per_insert=1, error=4)
    counts = LimitedCounts(limiter)
    counts.inserted, counts.writing = 1, 4
    assert not counts.may_insert(1, held=1)
    assert counts.may_take(4, held=1)
    assert not counts.may_take(5, held=1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_size": 0}, "`min_size` must be"),
        ({"error": 3}, "`error` must be None without `samples_per_insert`"),
        ({"samples_per_insert": 0, "error": 3}, "`samples_per_insert` must be above 0"),
        ({"samples_per_insert": 4}, "`error` must be a number with"),
        ({"samples_per_insert": 4, "error": 3}, "at least 1 and `samples_per_insert`"),
        ({"samples_per_insert": 0.5, "error": 0.7}, "must be finite, and at least 1"),
        ({"samples_per_insert": 1, "error": float("nan")}, "must be finite"),
        ({"samples_per_insert": float("inf"), "error": 1}, "must be finite"),
    ],
)
def test_a_limiter_that_could_let_nothing_pass_is_refused(options, text):
    with pytest.raises(ArgumentError, match=text):
        lp.RateLimiter(**options)


def test_sizes_that_could_wait_for_each_other_are_refused_by_the_number():
    limiter = lp.RateLimiter(min_size=5, samples_per_insert=2, error=10)
    limiter.check_sizes(batch=10, insert=5)
    with pytest.raises(ArgumentError, match=r"`error` must be at least 11, for .* 12"):
        limiter.check_sizes(batch=12, insert=5)
    with pytest.raises(ArgumentError, match="inserts of 7"):
        limiter.check_sizes(batch=1, insert=7)
