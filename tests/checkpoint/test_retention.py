import itertools
import math
import random

import pytest

from replicator.checkpoint.retention import Retention, Saved
from replicator.errors import ArgumentError

POLICIES = [
    Retention(
        keep_last=last, keep_best=best, metric="loss", goal=goal, keep_every=every
    )
    for last, best, goal, every in itertools.product(
        (1, 3), (0, 2), ("min", "max"), (None, 4)
    )
]


def replay(policy, saves):
    """Decide on saves one by one, and yield what is kept and gone after each."""
    kept, gone = (), set()
    for saved in saves:
        kept, delete = policy.decide(kept, saved)
        gone = (gone | set(delete)) - {saved.step}
        yield kept, gone


def random_saves(seed):
    rng = random.Random(seed)
    metrics = (None, math.nan, math.inf, 0.0, 1.0, 2.0, 3.0)
    steps = sorted(rng.sample(range(40), 12))
    return [Saved(step=step, metric=rng.choice(metrics)) for step in steps]


def is_number(saved):
    return saved.metric is not None and not math.isnan(saved.metric)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_what_the_words_say_of_all_that_was_saved(policy, seed):
    saves = random_saves(seed)
    sign = 1 if policy.goal == "min" else -1
    for number, (kept, gone) in enumerate(replay(policy, saves), start=1):
        seen = saves[:number]
        ranked = sorted(filter(is_number, seen), key=lambda s: sign * s.metric)
        wanted = {s.step for s in seen[-policy.keep_last :]}
        wanted |= {s.step for s in ranked[: policy.keep_best]}
        wanted |= {s.step for s in seen if policy.keep_every and s.step % 4 == 0}
        assert {s.step for s in kept} == wanted
        assert gone == {s.step for s in seen} - wanted


def test_the_best_is_the_oldest_of_equals():
    saves = [Saved(step=step, metric=1.0) for step in (3, 5, 9)]
    assert Retention(metric="loss").best(saves) == 3


def test_there_is_no_best_before_something_was_measured():
    assert Retention(metric="loss").best([Saved(step=1, metric=math.nan)]) is None


def test_a_step_that_is_saved_again_takes_its_own_place():
    policy = Retention(keep_last=2)
    *_, (kept, gone) = replay(policy, [Saved(step=s) for s in (1, 2, 3, 2)])
    assert [saved.step for saved in kept] == [3, 2]
    assert gone == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "`keep_last` must be at least 1, got 0"),
        ({"keep_best": -1}, "`keep_best` must be at least 0, got -1"),
        ({"keep_best": 1}, "`metric` must be given with `keep_best`"),
        ({"goal": "low"}, "`goal` must be one of 'min', 'max', got 'low'"),
        ({"keep_every": 0}, "`keep_every` must be at least 1, got 0"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Retention(**arguments)
