"""Ops are found wherever Python calls them, and refused where JAX hides them."""

import jax
import numpy as np
import pytest
from jax import lax

from replicator import controller
from replicator.errors import ArgumentError

ONES = np.ones(2, np.float32)


@pytest.fixture(scope="module")
def pw():
    with controller.local(islands=2, devices=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def double(pw):
    return pw.fn(lambda x: x * 2, pw.slice(1))


@pytest.mark.parametrize(
    ("where", "hide"),
    [
        ("cond", lambda f, x: lax.cond(x[0] > 0, f, lambda x: x, x)),
        ("while", lambda f, x: lax.while_loop(lambda x: x[0] < 5, f, x)),
        ("checkpoint", lambda f, x: jax.checkpoint(lambda x: f(x))(x)),
    ],
)
def test_an_op_that_jax_hides_is_refused_by_line(pw, double, where, hide):
    with pytest.raises(ArgumentError, match=f"inside of `{where}` at .*test_trace.py"):
        pw.program(lambda x: hide(double, x))(ONES)


def test_an_op_in_a_function_of_jit_is_an_op(pw, double):
    result = pw.program(jax.jit(lambda x: double(double(x))))(ONES)
    assert np.asarray(result).tolist() == [4.0, 4.0]


def test_an_operation_between_two_slices_is_refused_by_line(pw, double):
    other = pw.fn(lambda x: x + 1, pw.slice(1))
    with pytest.raises(ArgumentError, match=r"slice0 and slice1 at .*test_trace.py"):
        pw.program(lambda x: double(x) + other(x))(ONES)
