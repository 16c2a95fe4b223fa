import math
import re

import pytest

from replicator.errors import ArgumentError
from replicator.training.best_metric import BestSoFar, Evaluated, Follow


def verdicts(follow, values):
    """Decide on a value at steps 10, 20, ...; return all verdicts and the end."""
    best, found = BestSoFar(), []
    for index, value in enumerate(values):
        event = Evaluated(step=10 * (index + 1), value=value)
        best, verdict = follow.decide(best, event)
        found.append(verdict)
    return found, best


def test_the_smallest_value_is_the_best():
    found, best = verdicts(Follow(metric="loss"), [3.0, 2.0, 2.5, 1.0, 1.0])

    assert found == ["best", "best", "go_on", "best", "go_on"]
    assert best == BestSoFar(step=40, value=1.0, waited=1)


def test_the_largest_value_is_the_best_if_it_is_the_goal():
    found, _ = verdicts(Follow(metric="accuracy", goal="max"), [0.1, 0.3, 0.2])

    assert found == ["best", "best", "go_on"]


def test_patience_ends_after_so_many_evaluations_without_a_better_one():
    found, best = verdicts(Follow(metric="loss", patience=2), [1.0, 2.0, 0.5, 2.0, 2.0])

    assert found == ["best", "go_on", "best", "go_on", "stop"]
    assert (best.step, best.waited) == (30, 2)


def test_a_smaller_change_than_asked_for_is_none():
    found, _ = verdicts(Follow(metric="loss", min_change=0.1), [1.0, 0.95, 0.85])

    assert found == ["best", "go_on", "best"]


@pytest.mark.parametrize("goal", ["min", "max"])
def test_nan_is_never_the_best(goal):
    found, best = verdicts(Follow(metric="loss", goal=goal), [math.nan, 1.0, math.nan])

    assert found == ["go_on", "best", "go_on"]
    assert best.value == 1.0


REFUSED = {
    "goal": "`goal` must be one of 'min', 'max', got 'low'. Use one of these.",
    "patience": "`patience` must be at least 1, got 0. Leave it out to never stop "
    "early.",
    "min_change": "`min_change` must not be negative, got -1. Use 0.",
}


@pytest.mark.parametrize(
    "argument", [{"goal": "low"}, {"patience": 0}, {"min_change": -1}]
)
def test_what_breaks_its_rule_is_refused(argument):
    message = REFUSED[next(iter(argument))]

    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        Follow(metric="loss", **argument)
