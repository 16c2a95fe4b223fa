"""The norm of a tree is that of optax, whatever the sizes of its leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.base.global_norm import global_norm

TREES = {
    "short leaves": [(3,), (4, 5), ()],
    "a long leaf": [(784, 128)],
    "a long leaf that is not cut into stripes": [(16_385,)],
    "long and short": [(784, 128), (128,), (128, 128)],
    "an empty leaf": [(0, 3), (2,)],
    "no leaf": [],
}


def numbers(shape, *, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("shapes", TREES.values(), ids=TREES)
def test_it_is_the_norm_of_optax(shapes):
    tree = [numbers(shape, seed=seed) for seed, shape in enumerate(shapes)]
    expected = optax.tree.norm(tree)
    np.testing.assert_allclose(global_norm(tree), expected, rtol=1e-5)


def test_of_complex_numbers_the_absolute_values_count():
    leaf = jax.lax.complex(numbers((128, 128)), numbers((128, 128), seed=1))
    np.testing.assert_allclose(global_norm([leaf]), optax.tree.norm([leaf]), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 50_000, 784 * 128 - 1])
def test_one_bad_number_makes_it_bad(bad, place):
    leaf = numbers((784 * 128,)).at[place].set(bad).reshape(784, 128)
    assert not np.isfinite(global_norm({"kernel": leaf}))
