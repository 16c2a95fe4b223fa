"""How often processes tell each other the time (that they do: tests/multiprocess)."""

import pytest

from replicator.training.preemption.agreed_time import steps_to_next


def test_the_second_time_is_told_as_soon_as_the_first():
    assert steps_to_next(1, None, (1, 100.0)) == 1


def test_it_is_told_about_once_a_second():
    assert steps_to_next(80, (0, 100.0), (80, 100.8)) == 100


@pytest.mark.parametrize(("step_s", "steps"), [(1e-6, 2), (0.0, 2), (-1.0, 2)])
def test_steps_between_grow_by_and_by(step_s, steps):
    # The clock of process 0 may stand, or jump back.
    assert steps_to_next(1, (1, 100.0), (2, 100.0 + step_s)) == steps


def test_slow_steps_are_told_of_each_time():
    assert steps_to_next(1000, (0, 100.0), (1000, 4000.0)) == 1


def test_there_is_a_limit_to_how_seldom():
    assert steps_to_next(9_000, (0, 100.0), (9_000, 100.001)) == 10_000


def test_the_same_step_again_changes_nothing():
    assert steps_to_next(7, (5, 100.0), (5, 101.0)) == 7
