"""What is a spike, and what is not."""

import math

import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.training.nonfinite.spikes import Spikes


def spikes_in(values, **options):
    """Return the indices of the values that are spikes."""
    spikes, seen, found = Spikes(**options), (), []
    for index, value in enumerate(values):
        seen, spike = spikes.decide(seen, value)
        if spike is not None:
            found.append(index)
    return found


def noisy(count, *, seed=0):
    return 2 + 0.1 * np.random.default_rng(seed).normal(size=count)


def test_a_leap_is_found():
    assert spikes_in([*noisy(50), 9.0, *noisy(10)]) == [50]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike(seed):
    assert spikes_in(noisy(2000, seed=seed)) == []


def test_a_fall_is_no_spike():
    assert spikes_in([*noisy(50), 0.1, *noisy(50) / 20]) == []


def test_a_loss_that_comes_down_is_no_spike():
    assert spikes_in(5 * np.exp(-np.arange(500) / 50) + noisy(500)) == []


def test_a_level_that_stays_becomes_usual():
    found = spikes_in([*noisy(60), *(noisy(60) + 5)], window=40)
    assert found
    assert found[-1] < 60 + 25


def test_equal_numbers_have_a_spread_all_the_same():
    assert spikes_in([2.0] * 30 + [2.001, 3.0]) == [31]


def test_the_first_values_say_only_what_is_usual():
    assert spikes_in([1.0, 100.0, 1.0, 1.0]) == []


def test_what_is_not_finite_is_no_spike_and_moves_nothing():
    values = [*noisy(30), math.nan, math.inf, 9.0]
    assert spikes_in(values) == [32]


def test_a_spike_says_what_is_usual():
    _, words = Spikes().decide(tuple([1.0, 3.0] * 10), 50.0)
    assert words == "50 where 2 ± 1.5 is usual"


def test_a_metric_is_found_by_its_name():
    metrics = {"loss": np.float32(1), "parts": {"a": np.float32(2)}}
    assert Spikes(metric="parts/a").value_in(metrics) == 2


def test_a_metric_that_the_step_does_not_report_is_refused():
    with pytest.raises(ArgumentError, match="got 'los' and 'loss'"):
        Spikes(metric="los").value_in({"loss": np.float32(1)})


@pytest.mark.parametrize("arguments", [{"factor": 0}, {"window": 9}])
def test_numbers_out_of_range_are_refused(arguments):
    with pytest.raises(ArgumentError, match=f"`{next(iter(arguments))}` must be"):
        Spikes(**arguments)
