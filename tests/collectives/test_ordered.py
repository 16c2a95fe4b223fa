import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicator.collectives import add_in_order, all_reduce
from replicator.errors import ArgumentError
from tests.helpers import on_replicas

BLOCKS, EXAMPLES = 8, 4


def mlp_loss(params, x):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return jnp.mean((hidden @ params["w2"]) ** 2)


def mlp_params(key):
    k1, k2 = jax.random.split(key)
    return {
        "w1": jax.random.normal(k1, (16, 33)),
        "b1": jnp.zeros(33),
        "w2": jax.random.normal(k2, (33, 5)),
    }


def summed_gradients(params, data, replicas):
    """Sum block gradients over replicas × microbatches: block j·N + r."""
    own = data.reshape(BLOCKS // replicas, replicas, EXAMPLES, -1).swapaxes(0, 1)

    def one_replica(microbatches):
        def add(total, x):
            return add_in_order(total, jax.grad(mlp_loss)(params, x)), None

        return lax.scan(add, jax.tree.map(jnp.zeros_like, params), microbatches)[0]

    return on_replicas(one_replica, own, n=replicas)


def test_bits_do_not_depend_on_replicas_times_microbatches(key):
    params = mlp_params(key)
    data = np.random.default_rng(0).normal(size=(BLOCKS, EXAMPLES, 16))
    sums = {
        n: summed_gradients(params, data.astype(np.float32), n) for n in (1, 2, 4, 8)
    }
    for n, found in sums.items():
        for leaf, reference in zip(
            jax.tree.leaves(found), jax.tree.leaves(sums[8]), strict=True
        ):
            assert leaf.dtype == jnp.float32
            expected = np.broadcast_to(reference[0], (n, *reference[0].shape))
            np.testing.assert_array_equal(leaf, expected)


def test_replicas_are_added_from_left_to_right():
    x = (
        np.random.default_rng(1).normal(size=(8, 1000)) * 10.0 ** np.arange(8)[:, None]
    ).astype(np.float32)
    left_to_right = functools.reduce(np.add, x)
    found = on_replicas(lambda x: all_reduce(x, "sum", reduction="ordered"), x)
    np.testing.assert_array_equal(found, np.broadcast_to(left_to_right, x.shape))
    assert np.any(left_to_right != functools.reduce(np.add, x[::-1]))


def test_the_sum_so_far_comes_first():
    total, x = np.float32(1e8), np.array([3, 3], np.float32)
    found = on_replicas(lambda x: add_in_order(total, x), x, n=2)
    assert found.tolist() == [np.float32(np.float32(total + x[0]) + x[1])] * 2


def test_ordered_mean_may_be_weighted():
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    w = np.arange(8, dtype=np.float32)
    found = on_replicas(lambda x, w: all_reduce(x, weight=w, reduction="ordered"), x, w)
    np.testing.assert_allclose(found[3], np.average(x, axis=0, weights=w), rtol=1e-5)


def test_a_tree_that_does_not_fit_the_total_is_refused():
    with pytest.raises(ArgumentError) as caught:
        add_in_order({"w": np.zeros(3, np.float32)}, {"w": np.zeros(2, np.float32)})
    assert str(caught.value) == (
        "`tree` must have the structure, shapes and dtypes of `total`, got a tree "
        "where `w` is float32[2] instead of float32[3]. Start from zeros like `tree`."
    )
