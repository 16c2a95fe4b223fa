import math

import numpy as np
import pytest

from experiments.programs.evolution_strategies import (
    HIDDEN,
    LONGEST,
    WEIGHTS,
    Evolution,
    balance,
    centered_ranks,
    draw_starts,
    evolve,
    first_weights,
)

SHORT = Evolution(generations=8, pairs=32, episodes=2)


def balance_alone(policy, start):
    """Play one policy from one start, number by number."""
    first, second = policy[: 4 * HIDDEN].reshape(4, HIDDEN), policy[4 * HIDDEN :]
    x, v, angle, turn = start
    for step in range(LONGEST):
        if abs(x) >= 2.4 or abs(angle) >= math.radians(12):
            return step
        push = 10 if np.tanh([x, v, angle, turn] @ first) @ second > 0 else -10
        sin, cos = math.sin(angle), math.cos(angle)
        common = (push + 0.1 * 0.5 * turn**2 * sin) / 1.1
        falling = (9.8 * sin - cos * common) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        driving = common - 0.1 * 0.5 * falling * cos / 1.1
        x, v = x + 0.02 * v, v + 0.02 * driving
        angle, turn = angle + 0.02 * turn, turn + 0.02 * falling
    return LONGEST


def test_side_by_side_each_policy_lasts_as_long_as_alone():
    policies = np.random.default_rng(0).normal(size=(20, WEIGHTS))
    starts = draw_starts(0, 3)
    alone = [np.mean([balance_alone(p, start) for start in starts]) for p in policies]
    np.testing.assert_allclose(balance(policies, starts), alone)
    assert min(alone) < 20 < 100 < max(alone)


def test_evolution_teaches_a_policy_that_fell_to_keep_the_pole_up(launcher):
    weights = evolve(launcher, workers=3, evolution=SHORT)["weights"]
    before, after = balance(
        np.stack([first_weights(SHORT.seed), weights]), draw_starts(12345, 50)
    )
    assert before < 50
    assert after > 400


@pytest.mark.parametrize("workers", [2, 5])
def test_the_weights_are_the_same_for_any_number_of_workers(workers):
    short = Evolution(generations=3, pairs=8, episodes=2)
    alone = evolve(workers=1, evolution=short)
    shared = evolve(workers=workers, evolution=short)
    np.testing.assert_array_equal(shared["weights"], alone["weights"])
    assert shared["means"] == alone["means"]


def test_ranks_are_centered_and_ties_are_fair():
    np.testing.assert_allclose(centered_ranks(np.array([7, 1, 3.0])), [0.5, -0.5, 0])
    np.testing.assert_allclose(centered_ranks(np.array([2, 2, 2.0])), 0)
    ranks = centered_ranks(np.array([5, 5, 1.0]))
    np.testing.assert_allclose(ranks, [0.25, 0.25, -0.5])
