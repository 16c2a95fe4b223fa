"""What measured times say of predictions, and of a choice. No effects."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.timing import Estimate, ratio_of_medians

Times = Mapping[str, Sequence[float]]
"""By candidate, the seconds of each turn."""

DIFFERS = 1.25
"""Ratio of two times above which their order is not chance."""


class Pairs(NamedTuple):
    """Pairs of candidates whose times differ.

    Attributes:
      right: Number of those that predictions order rightly.
      wrong: Names of the others, the faster first.
    """

    right: int
    wrong: list[tuple[str, str]]


def ordered_pairs(times_s: Times, predicted_s: Mapping[str, float]) -> Pairs:
    """Hold predictions against the medians of measured times.

    >>> ordered_pairs({"a": [1.0], "b": [2.0], "c": [2.1]}, {"a": 3, "b": 5, "c": 2})
    Pairs(right=1, wrong=[('a', 'c')])
    """
    medians = {name: float(np.median(each)) for name, each in times_s.items()}
    right, wrong = 0, []
    for fast, slow in itertools.permutations(medians, 2):
        if medians[slow] <= DIFFERS * medians[fast]:
            continue
        if predicted_s[fast] < predicted_s[slow]:
            right += 1
        else:
            wrong.append((fast, slow))
    return Pairs(right, wrong)


def fastest(times_s: Times, names: Sequence[str]) -> str:
    """Return the candidate among `names` whose median is the least.

    >>> fastest({"a": [3.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}, ["b", "a"])
    'a'
    """
    return min(names, key=lambda name: float(np.median(times_s[name])))


def regret(times_s: Times, taken: str, best: str) -> Estimate:
    """Estimate how many times as long a candidate takes as the best.

    >>> regret({"a": [2.0, 4.0], "b": [1.0, 2.0]}, "a", "b").median
    2.0
    """
    return ratio_of_medians(times_s[taken], times_s[best])


def is_best(times_s: Times, taken: str, best: str, same: Estimate) -> bool:
    """Return whether a candidate is the best, or differs from it as one from itself.

    Args:
      times_s: The times.
      taken: The candidate.
      best: The fastest.
      same: Ratio of two timings of one candidate, in turns.

    >>> times_s = {"a": [2.0, 2.0], "b": [1.0, 1.0]}
    >>> is_best(times_s, "a", "b", Estimate(median=1.0, low=0.9, high=1.1))
    False
    """
    noise = max(same.high, 1 / same.low)
    return regret(times_s, taken, best).low <= noise
