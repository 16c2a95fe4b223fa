import jax
import jax.numpy as jnp
import pytest

from replicator.engine.sharding_constraints.moves import backward, forward

A = "shard"
MOVES = {
    "transpose": (
        lambda x: x.transpose(2, 0, 1),
        (4, 6, 8),
        (None, A, None),
        (None, None, A),
    ),
    "squeeze": (lambda x: x.squeeze(1), (4, 1, 8), (None, None, A), (None, A)),
    "split": (lambda x: x.reshape(4, 2, 3), (4, 6), (None, A), (None, A, None)),
    "merge": (lambda x: x.reshape(24, 8), (4, 6, 8), (A, None, None), (A, None)),
    "new axes of one": (
        lambda x: x.reshape(1, 4, 1, 6),
        (4, 6),
        (A, None),
        (None, A, None, None),
    ),
    "scalar axes": (lambda x: x.reshape(1, 4), (4, 1), (A, None), (None, A)),
}
LOST = {
    "merge behind": (lambda x: x.reshape(24, 8), (4, 6, 8), (None, A, None)),
    "slice of a cut": (lambda x: x[:2], (4, 6), (A, None)),
    "sum": (lambda x: x.sum(0), (4, 6), (None, A)),
}


def equation(fn, shape):
    [eqn] = jax.make_jaxpr(fn)(jnp.zeros(shape)).jaxpr.eqns
    return eqn


@pytest.mark.parametrize("name", MOVES)
def test_a_cut_follows_its_dimension_there_and_back(name):
    fn, shape, before, after = MOVES[name]
    eqn = equation(fn, shape)

    assert forward(eqn, before) == after
    assert backward(eqn, eqn.invars[0], after) == before


@pytest.mark.parametrize("name", LOST)
def test_a_cut_that_nothing_follows_is_given_up(name):
    fn, shape, before = LOST[name]
    assert forward(equation(fn, shape), before) is None


def test_a_slice_keeps_the_cut_of_other_dimensions():
    assert forward(equation(lambda x: x[:2], (4, 6)), (None, A)) == (None, A)
