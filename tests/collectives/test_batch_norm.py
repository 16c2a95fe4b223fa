import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from replicator.base.mesh import replica_mesh
from replicator.collectives.batch_norm import (
    RunningMoments,
    normalize,
    update_running,
    update_standing,
)
from replicator.collectives.context.microbatch import Microbatch, in_microbatch
from replicator.collectives.moments import Moments, batch_moments, make_windows

EPSILON = 1e-5


def batch_norm(x, params, **choice):
    scale, bias = params
    moments = batch_moments(x, make_windows(len(x), **choice))
    return normalize(x, moments, scale=scale, bias=bias, epsilon=EPSILON)


def numpy_batch_norm(x, params):
    """Batch norm by definition, on one device and all examples."""
    scale, bias = (np.asarray(param, np.float64) for param in params)
    x = np.asarray(x, np.float64)
    axes = tuple(range(x.ndim - 1))
    return scale * (x - x.mean(axes)) / np.sqrt(x.var(axes) + EPSILON) + bias


def central_differences(fn, value, step=1e-5):
    """Differentiate a scalar function of an array in float64."""
    value = np.asarray(value, np.float64)
    grad = np.zeros(value.shape)
    for index in np.ndindex(value.shape):
        up, down = value.copy(), value.copy()
        up[index] += step
        down[index] -= step
        grad[index] = (fn(up) - fn(down)) / (2 * step)
    return grad


@functools.cache
def value_and_grads(replicas, **choice):
    """Compile the norm and the gradients of a weighted sum of its outputs."""

    def fn(x, params, probe):
        y, vjp = jax.vjp(functools.partial(batch_norm, **choice), x, params)
        x_grad, params_grad = vjp(probe)
        return (
            y,
            x_grad,
            jax.tree.map(lambda g: jax.lax.psum(g, "replica"), params_grad),
        )

    cut, whole = P("replica"), P()
    return jax.jit(
        jax.shard_map(
            fn,
            mesh=replica_mesh(replicas),
            in_specs=(cut, whole, cut),
            out_specs=(cut, cut, whole),
            check_vma=False,
        )
    )


@pytest.fixture
def case(key):
    """Inputs, (scale, bias), and the weights of a weighted sum of the outputs."""
    keys = jax.random.split(key, 4)
    x = 2.0 + 3.0 * jax.random.normal(keys[0], (8, 3, 2))
    params = 1.0 + jax.random.normal(keys[1], (2,)), jax.random.normal(keys[2], (2,))
    return x, params, jax.random.normal(keys[3], x.shape)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_outputs_equal_numpy_over_the_concatenated_batch(case, replicas):
    x, params, probe = case
    y, _, _ = value_and_grads(replicas)(x, params, probe)
    np.testing.assert_allclose(y, numpy_batch_norm(x, params), atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_input_gradients_equal_central_differences(case, replicas):
    x, params, probe = case
    _, found, _ = value_and_grads(replicas)(x, params, probe)
    expected = central_differences(
        lambda x: np.sum(np.asarray(probe) * numpy_batch_norm(x, params)), x
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_parameter_gradients_equal_central_differences(case, replicas):
    x, params, probe = case
    _, _, found = value_and_grads(replicas)(x, params, probe)
    expected = central_differences(
        lambda p: np.sum(np.asarray(probe) * numpy_batch_norm(x, p)), np.stack(params)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_fixed_windows_normalise_alike_on_any_number_of_replicas(case, replicas):
    x, params, probe = case
    y, x_grad, _ = value_and_grads(replicas, stats_batch=4)(x, params, probe)
    one = value_and_grads(1)  # each window as a job of its own
    for part in (slice(0, 4), slice(4, 8)):
        job_y, job_grad, _ = one(x[part], params, probe[part])
        np.testing.assert_allclose(y[part], job_y, atol=1e-5)
        np.testing.assert_allclose(x_grad[part], job_grad, atol=1e-5)


def test_without_scale_and_bias_outputs_are_standardised(case):
    y = normalize(case[0], batch_moments(case[0], make_windows(8)))
    np.testing.assert_allclose(y.mean((0, 1)), 0, atol=1e-6)
    np.testing.assert_allclose(y.var((0, 1)), 1, rtol=1e-5)


def test_frozen_statistics_normalise_each_example_alone(case):
    x, (scale, bias), _ = case
    running = RunningMoments(jnp.asarray([1.0, -1.0]), jnp.asarray([4.0, 9.0]))
    y = normalize(x, running, scale=scale, bias=bias, epsilon=0.0)
    standard = (np.asarray(x) - [1.0, -1.0]) / [2.0, 3.0]
    expected = np.asarray(scale) * standard + np.asarray(bias)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    alone = normalize(x[2:3], running, scale=scale, bias=bias, epsilon=0.0)
    np.testing.assert_array_equal(y[2:3], alone)


def pooled_batch(mean, var, weight=1.0):
    return Moments(
        jnp.full((1, 2), mean), jnp.full((1, 2), var), jnp.full((1,), weight)
    )


START = RunningMoments(jnp.full(2, 10.0), jnp.full(2, 20.0))


def test_one_update_moves_by_the_momentum():
    mean, var = update_running(START, pooled_batch(2.0, 4.0), momentum=0.75)
    np.testing.assert_allclose(mean, 8.0)
    np.testing.assert_allclose(var, 16.0)


def accumulated(update, carry, batches):
    """Fold `update` over the microbatches of one update, as an engine would."""

    def body(carry, item):
        index, moments = item
        with in_microbatch(Microbatch(index=index, count=len(batches))):
            return update(carry, moments), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    return jax.lax.scan(body, carry, (jnp.arange(len(batches)), stacked))[0]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_accumulated_update_moves_once(count):
    batches = [pooled_batch(float(j), 2.0 * j) for j in range(count)]
    moved = accumulated(
        functools.partial(update_running, momentum=0.75), START, batches
    )
    new = (count - 1) / 2  # the mean of 0 … count-1
    np.testing.assert_allclose(moved.mean, 0.75 * 10 + 0.25 * new, rtol=1e-6)
    np.testing.assert_allclose(moved.var, 0.75 * 20 + 0.25 * 2 * new, rtol=1e-6)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_microbatch_without_weight_leaves_the_average_where_it_is(empty):
    batches = [pooled_batch(10.0, 20.0)] * 3
    batches[empty] = pooled_batch(0.0, 0.0, weight=0.0)
    moved = accumulated(
        functools.partial(update_running, momentum=0.75), START, batches
    )
    np.testing.assert_allclose(moved.mean, START.mean, rtol=1e-6)
    np.testing.assert_allclose(moved.var, START.var, rtol=1e-6)


def test_standing_statistics_weigh_every_batch_alike():
    standing, batches = START, jnp.zeros(())
    for mean in (1.0, 2.0, 6.0):
        moments = pooled_batch(mean, 2 * mean)
        standing, batches = update_standing(standing, moments, batches)
    np.testing.assert_allclose(standing.mean, 3.0, rtol=1e-6)
    np.testing.assert_allclose(standing.var, 6.0, rtol=1e-6)
    assert batches == 3


def test_standing_statistics_count_updates_not_microbatches():
    def update(carry, moments):
        return update_standing(carry[0], moments, carry[1])

    carry = START, jnp.zeros(())
    for means in ((1.0, 3.0), (5.0, 7.0)):
        carry = accumulated(update, carry, [pooled_batch(m, m) for m in means])
    np.testing.assert_allclose(carry[0].mean, 4.0, rtol=1e-6)
    assert carry[1] == 2
