import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from replicator.base.mesh import replica_mesh
from replicator.collectives.moments import (
    Windows,
    batch_moments,
    check_stats,
    make_windows,
    pooled,
)
from replicator.errors import ArgumentError

REPLICAS = (1, 2, 4, 8)


def over_replicas(fn, replicas):
    return jax.jit(
        jax.shard_map(
            fn,
            mesh=replica_mesh(replicas),
            in_specs=P("replica"),
            out_specs=P("replica"),
            check_vma=False,
        )
    )


def window_moments(x, weight=None, **choice):
    return batch_moments(x, make_windows(len(x), **choice), weight=weight)


def pooled_moments(x, weight=None, **choice):
    windows = make_windows(len(x), **choice)
    return pooled(batch_moments(x, windows, weight=weight), windows)


def numpy_moments(x):
    x = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    return x.mean(0), x.var(0)


def assert_moments(found, windows):
    """Compare each row of `found` with NumPy over the examples of its window."""
    expected = [numpy_moments(window) for window in windows]
    np.testing.assert_allclose(found.mean, [mean for mean, _ in expected], atol=1e-5)
    np.testing.assert_allclose(found.var, [var for _, var in expected], rtol=1e-5)


@pytest.fixture
def x(key):
    return 3.0 + jax.random.normal(key, (16, 2, 3, 4))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_every_replica_holds_the_moments_of_the_concatenated_batch(x, replicas):
    assert_moments(over_replicas(window_moments, replicas)(x), [x] * replicas)


def test_outside_a_step_the_batch_is_whole(x):
    assert_moments(window_moments(x), [x])


def test_examples_without_positions_have_moments_too(x):
    found = over_replicas(window_moments, 4)(x[:, 0, 0])
    assert_moments(found, [x[:, 0, 0]] * 4)


def test_each_replica_may_keep_to_itself(x):
    found = over_replicas(functools.partial(window_moments, stats="replica"), 4)(x)
    assert_moments(found, np.split(x, 4))


def test_a_group_of_replicas_equals_a_smaller_job(x):
    found = over_replicas(functools.partial(window_moments, stats=4), 8)(x)
    job = over_replicas(window_moments, 4)
    jobs = [job(half) for half in np.split(x, 2)]
    np.testing.assert_array_equal(found.mean, np.concatenate([j.mean for j in jobs]))
    np.testing.assert_array_equal(found.var, np.concatenate([j.var for j in jobs]))


def test_explicit_groups_need_not_be_neighbours(x):
    fn = functools.partial(window_moments, stats=((0, 3), (1, 2)))
    outer, inner = np.concatenate([x[:4], x[12:]]), x[4:12]
    assert_moments(over_replicas(fn, 4)(x), [outer, inner, inner, outer])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_fixed_windows_ignore_replicas_and_microbatches(x, replicas, microbatches):
    fn = over_replicas(functools.partial(pooled_moments, stats_batch=4), replicas)
    found = [fn(part) for part in np.split(x, microbatches)]
    mean = np.mean([part.mean for part in found], axis=(0, 1))
    var = np.mean([part.var for part in found], axis=(0, 1))
    windows = [numpy_moments(window) for window in np.split(np.asarray(x), 4)]
    np.testing.assert_allclose(mean, np.mean([m for m, _ in windows], 0), rtol=1e-5)
    np.testing.assert_allclose(var, np.mean([v for _, v in windows], 0), rtol=1e-5)


@pytest.mark.parametrize(
    ("replica_batch", "replicas", "expected"),
    [
        (8, 2, Windows(per_replica=2, groups=((0,), (1,)))),
        (4, 2, Windows(per_replica=1, groups=((0,), (1,)))),
        (2, 4, Windows(per_replica=1, groups=((0, 1), (2, 3)))),
        (1, 4, Windows(per_replica=1, groups=((0, 1, 2, 3),))),
    ],
)
def test_fixed_windows_cut_replicas_or_span_them(replica_batch, replicas, expected):
    found = []

    def fn(x):
        found.append(make_windows(replica_batch, stats_batch=4))
        return x

    jax.eval_shape(over_replicas(fn, replicas), jnp.zeros(replicas))
    assert found == [expected]


@pytest.mark.parametrize("choice", [{}, {"stats": 2}, {"stats": "replica"}])
def test_pooled_moments_are_the_same_on_every_replica(x, choice):
    found = over_replicas(functools.partial(pooled_moments, **choice), 4)(x)
    np.testing.assert_array_equal(found.mean, found.mean[:1].repeat(4, axis=0))
    np.testing.assert_array_equal(found.var, found.var[:1].repeat(4, axis=0))


def test_pooled_windows_count_by_their_weight(x):
    fn = over_replicas(functools.partial(pooled_moments, stats="replica"), 2)
    weight = jnp.asarray([1.0] * 8 + [1.0, 1.0] + [0.0] * 6)
    first, second = numpy_moments(x[:8])[1], numpy_moments(x[8:10])[1]
    expected = (8 * first + 2 * second) / 10
    np.testing.assert_allclose(fn(x, weight).var[0], expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bool])
def test_examples_of_weight_zero_change_nothing(x, dtype):
    whole = x.at[10:].set(jnp.nan)  # the last of four replicas holds only padding
    weight = (jnp.arange(16) < 10).astype(dtype)
    assert_moments(over_replicas(window_moments, 4)(whole, weight), [x[:10]] * 4)


def test_examples_of_weight_zero_get_no_gradient_from_the_statistics(x):
    x = x.at[10:].set(jnp.nan)
    weight = jnp.arange(16) < 10
    grads = jax.grad(lambda x: window_moments(x, weight).var.sum())(x)
    assert np.isfinite(grads).all()
    np.testing.assert_array_equal(grads[10:], 0)


def test_a_window_of_padding_only_is_finite(x):
    found = window_moments(x, jnp.zeros(16))
    assert np.isfinite(found.mean).all()
    np.testing.assert_array_equal(found.var, 0)


def test_weights_count_like_repeated_examples(x):
    weight = jnp.asarray([3.0, 2.0] + [0.0] * 14)
    repeated = np.concatenate([x[:1]] * 3 + [x[1:2]] * 2)
    assert_moments(over_replicas(window_moments, 2)(x, weight), [repeated] * 2)


# At mean 1e6 the inputs themselves are rounded to 1/16: that alone is 3e-4.
@pytest.mark.parametrize("mean", [1e4, 1e6])
@pytest.mark.parametrize("replicas", [1, 8])
@pytest.mark.parametrize("shape", [(512, 8, 8, 4), (32768, 4)])
def test_variance_survives_a_large_mean(key, mean, replicas, shape):
    x = mean + jax.random.normal(key, shape)
    found = over_replicas(window_moments, replicas)(x).var
    np.testing.assert_allclose(found, [numpy_moments(x)[1]] * replicas, rtol=1e-3)
    np.testing.assert_allclose(found, 1, rtol=2e-2)  # 32,768 draws: 0.8 % is one sigma


# The square of the mean's rounding error, of which two units are 2e-3 and 2e-2.
@pytest.mark.parametrize(("mean", "rtol"), [(1e4, 1e-5), (1e5, 5e-4)])
@pytest.mark.parametrize("shape", [(64, 8, 8, 4), (4096, 4)])
def test_variance_survives_large_means_that_differ(key, mean, rtol, shape):
    features = mean * (1 + np.arange(4) / 70)  # none but the first a round number
    examples = 3 * np.linspace(0, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    x = jnp.asarray(features + examples + jax.random.normal(key, shape), jnp.float32)
    found = over_replicas(window_moments, 8)(x).var
    np.testing.assert_allclose(found, [numpy_moments(x)[1]] * 8, rtol=rtol)


def test_half_precision_inputs_have_single_precision_moments(x):
    found = window_moments(x.astype(jnp.bfloat16))
    assert {leaf.dtype for leaf in found} == {jnp.dtype(jnp.float32)}
    assert_moments(found, [x.astype(jnp.bfloat16).astype(jnp.float32)])


def penalty(moments, x, probe):
    """A loss of the gradient of a loss: its gradient takes second derivatives."""

    def loss(x):
        mean, var = moments(x)
        return jnp.sum(probe[0] * mean**3 + probe[1] * var**2)

    return jnp.square(jax.grad(loss)(x)).sum()


def plain_moments(x):
    axes = tuple(range(x.ndim - 1))
    return x.mean(axes)[None], x.var(axes)[None]


def test_second_derivatives_are_those_of_one_device(x, key):
    probe = jax.random.normal(key, (2, 1, 4))
    # All four replicas add the loss of the same moments: a quarter each is one loss.
    share = functools.partial(penalty, lambda x: window_moments(x)[:2], probe=probe / 4)
    found = over_replicas(jax.grad(share), 4)(x)
    expected = jax.grad(functools.partial(penalty, plain_moments, probe=probe))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("choice", [{}, {"stats": 4}, {"stats_batch": 8}])
def test_all_reduces_are_three_and_carry_what_two_passes_would(x, choice):
    def grad(x):
        moments, vjp = jax.vjp(functools.partial(window_moments, **choice), x)
        return vjp(moments)

    text = str(jax.make_jaxpr(over_replicas(grad, 8))(x))
    widths = re.findall(r"f32\[\d+,(\d+)\] = psum\[", text)
    # Of 4 features: means forward, squares forward, both backward.
    assert widths == ["4", "4", "8"]
    assert text.count("psum[") == 3


@pytest.mark.parametrize(
    ("replicas", "choice", "message"),
    [
        (
            4,
            {"stats_batch": 6},
            "`stats_batch` must divide each replica's 4 examples, or span whole "
            "replicas evenly, got 6 for 4 replicas. Use 2, or change the global batch.",
        ),
        (
            4,
            {"stats_batch": 12},
            "`stats_batch` must divide each replica's 4 examples, or span whole "
            "replicas evenly, got 12 for 4 replicas. "
            "Use 4, or change the global batch.",
        ),
        (
            8,
            {"stats": 6},
            "`stats` must divide the number of replicas, got 6 for 8. Use 2, or `stats_"
            "batch` for statistics that do not depend on the number of replicas.",
        ),
        (
            4,
            {"stats": ((0, 1, 2), (3,))},
            "`stats` must name each of the 4 replicas once, in groups of equal size, "
            "got ((0, 1, 2), (3,)). Give a group size for consecutive replicas.",
        ),
    ],
)
def test_windows_that_do_not_fit_are_refused(replicas, choice, message):
    fn = over_replicas(functools.partial(window_moments, **choice), replicas)
    with pytest.raises(ArgumentError) as error:
        jax.eval_shape(fn, jnp.zeros((4 * replicas, 2)))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("stats", "stats_batch", "message"),
    [
        (
            "batch",
            None,
            "`stats` must be 'all', 'replica', a number of replicas or groups of them, "
            "got 'batch'. Use 'all' for statistics over the global batch.",
        ),
        (
            0,
            None,
            "`stats` must be at least 1, got 0. Use 'replica' or 'all'.",
        ),
        (
            2,
            8,
            "`stats` must be 'all' where `stats_batch` is given, got 2. "
            "Leave one of them out.",
        ),
        (
            "all",
            0,
            "`stats_batch` must be at least 1, got 0. "
            "Use None for statistics over the global batch.",
        ),
    ],
)
def test_a_wrong_choice_is_refused_for_any_number_of_replicas(
    stats, stats_batch, message
):
    with pytest.raises(ArgumentError) as error:
        check_stats(stats, stats_batch)
    assert str(error.value) == message
