import dataclasses
import itertools

import numpy as np
import pytest

from experiments.programs.gradient_coding import (
    Descent,
    cyclic_code,
    decoding,
    descend,
    gradient,
    make_parts,
)

SMALL = Descent(examples=400, features=5, steps=12, rate=1e-2)


def descend_alone(descent):
    """Take the steps of one machine that has all of the data."""
    x, y = (np.concatenate(each) for each in zip(*make_parts(1, descent), strict=True))
    weights = np.zeros(descent.features)
    for _ in range(descent.steps):
        weights = weights - descent.rate * gradient(weights, x, y)
    return weights


def test_any_six_of_eight_answers_give_the_full_gradient():
    descent = Descent()
    weights = np.random.default_rng(1).normal(size=descent.features)
    parts = np.stack([gradient(weights, x, y) for x, y in make_parts(8, descent)])
    code = cyclic_code(8, 2)
    answers = code @ parts
    for survivors in itertools.combinations(range(8), 6):
        decoded = decoding(code, survivors) @ answers[list(survivors)]
        np.testing.assert_allclose(decoded, parts.sum(axis=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("n", "s"), [(2, 1), (3, 1), (5, 2), (6, 0), (8, 2), (9, 3)])
def test_each_worker_holds_s_plus_one_parts_and_any_n_less_s_suffice(n, s):
    code = cyclic_code(n, s)
    for row in range(n):
        assert set(np.flatnonzero(code[row])) == {(row + j) % n for j in range(s + 1)}
    for survivors in itertools.combinations(range(n), n - s):
        ones = decoding(code, survivors) @ code[list(survivors)]
        np.testing.assert_allclose(ones, np.ones(n), atol=1e-8)


def test_fewer_answers_than_that_are_not_enough():
    code = cyclic_code(8, 2)
    for survivors in itertools.combinations(range(8), 5):
        assert (
            np.abs(decoding(code, survivors) @ code[list(survivors)] - 1).max() > 1e-3
        )


def test_the_descent_is_that_of_one_machine(launcher):
    found = descend(launcher, workers=5, stragglers=2, delay_ms=2, descent=SMALL)
    expected = descend_alone(SMALL)
    assert np.linalg.norm(expected) > 1
    for weights in found["weights"].values():
        np.testing.assert_allclose(weights, expected, rtol=1e-8)


def test_a_straggler_does_not_hold_a_coded_step():
    two_steps = dataclasses.replace(SMALL, steps=2)
    found = descend(workers=5, stragglers=2, delay_ms=150, descent=two_steps)
    # Of their five delays the third are 0.19 s in all, the last 1.1 s: it holds on a
    # machine so busy that each step takes another second.
    assert sum(found["seconds"]["coded"]) < 0.7 * sum(found["seconds"]["plain"])
