"""Windows, replicas and microbatches without a real example: nothing comes of them."""

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
from replicator.collectives.moments import (
    Moments,
    batch_moments,
    make_windows,
    pooled,
)

EXAMPLES, POSITIONS, FEATURES = 16, 2, 3
EPSILON, MOMENTUM = 1e-5, 0.7
MODES = {
    "all": {},
    "replica": {"stats": "replica"},
    "pairs": {"stats": 2},
    "groups": {"stats": "far"},
    "fixed": {"stats_batch": 2},
}
REPLICAS = {"all": (1, 2, 4), "replica": (1, 2, 4), "pairs": (2, 4), "groups": (4,)}
CUTS = [
    (mode, replicas, k)
    for mode in MODES
    for replicas in REPLICAS.get(mode, (1, 2, 4))
    for k in (1, 4)
]


def choice_of(mode):
    choice = MODES[mode]
    return {"stats": ((0, 3), (1, 2))} if choice == {"stats": "far"} else choice


def windows_of(mode, replicas, rows):
    """List the examples that share statistics, among those of one microbatch."""
    if mode == "all":
        return [rows]
    if mode == "fixed":
        return np.split(rows, len(rows) // 2)
    own = np.split(rows, replicas)
    groups = {
        "replica": [[each] for each in range(replicas)],
        "pairs": [[each, each + 1] for each in range(0, replicas, 2)],
        "groups": [[0, 3], [1, 2]],
    }
    return [np.concatenate([own[each] for each in group]) for group in groups[mode]]


def gradients_by_definition(x, params, probe, real, cut):
    """Differentiate a sum of real outputs by hand, window by window, in NumPy."""
    mode, replicas, k = cut
    x_grad, scale_grad, bias_grad = (np.zeros(x.shape), *np.zeros((2, FEATURES)))
    for rows in np.split(np.arange(EXAMPLES), k):
        for window in windows_of(mode, replicas, rows):
            if len(kept := window[real[window]]):
                g, deviation = probe[kept], x[kept] - x[kept].mean((0, 1))
                factor = 1 / np.sqrt(x[kept].var((0, 1)) + EPSILON)
                y = deviation * factor
                rest = g - g.mean((0, 1)) - y * (g * y).mean((0, 1))
                x_grad[kept] = params[0] * factor * rest
                scale_grad += (g * y).sum((0, 1))
                bias_grad += g.sum((0, 1))
    return x_grad, scale_grad, bias_grad


def running_by_definition(x, real, cut, start):
    """Average the moments of the microbatches with real examples, in NumPy."""
    mode, replicas, k = cut
    found = []
    for rows in np.split(np.arange(EXAMPLES), k):
        parts = [w[real[w]] for w in windows_of(mode, replicas, rows)]
        parts = [x[part] for part in parts if len(part)]
        if parts:
            sizes = [len(part) for part in parts]
            moments = [(p.mean((0, 1)), p.var((0, 1))) for p in parts]
            found.append(np.average(moments, axis=0, weights=sizes))
    new = np.mean(found, axis=0)
    return MOMENTUM * np.stack(start) + (1 - MOMENTUM) * new


@functools.cache
def one_microbatch(mode, replicas):
    """Compile outputs, gradients of a sum of real outputs, and pooled moments."""

    def fn(x, params, probe, real):
        windows = make_windows(len(x), **choice_of(mode))

        def loss(x, params):
            scale, bias = params
            moments = batch_moments(x, windows, weight=real)
            y = normalize(x, moments, scale=scale, bias=bias, epsilon=EPSILON)
            kept = jnp.where(real[:, None, None] > 0, y * probe, 0)
            return kept.sum(), (y, pooled(moments, windows))

        grads, (y, found) = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, params)
        params_grad = jax.tree.map(lambda g: jax.lax.psum(g, "replica"), grads[1])
        return y, grads[0], params_grad, found

    rows, whole = P("replica"), P()
    return jax.jit(
        jax.shard_map(
            fn,
            mesh=replica_mesh(replicas),
            in_specs=(rows, whole, rows, rows),
            out_specs=(rows, rows, whole, whole),
            check_vma=False,
        )
    )


def case(real_examples):
    rng = np.random.default_rng(real_examples)
    x = 2 + 3 * rng.normal(size=(EXAMPLES, POSITIONS, FEATURES))
    params = rng.normal(size=FEATURES), rng.normal(size=FEATURES)
    return x, params, rng.normal(size=x.shape), np.arange(EXAMPLES) < real_examples


def microbatches(cut, x, params, probe, real):
    """Run every microbatch of a cut; padding is far from everything."""
    mode, replicas, k = cut
    x = np.where(real[:, None, None], x, 1e6 * x)
    program = one_microbatch(mode, replicas)
    return [
        program(x[rows], params, probe[rows], real[rows].astype(x.dtype))
        for rows in np.split(np.arange(EXAMPLES), k)
    ]


@pytest.mark.parametrize("real_examples", [1, 5, 9])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_gradients_are_those_of_the_real_examples_alone(cut, real_examples):
    x, params, probe, real = case(real_examples)
    expected = gradients_by_definition(x, params, probe, real, cut)
    with jax.enable_x64(True):
        found = jax.device_get(microbatches(cut, x, params, probe, real))
    x_grad = np.concatenate([each[1] for each in found])
    params_grad = np.sum([each[2] for each in found], axis=0)
    np.testing.assert_allclose(x_grad, expected[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(params_grad, expected[1:], rtol=1e-9, atol=1e-12)


def stacked(batches):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(batches))


def over_microbatches(update, carry, batches, real):
    """Fold `update` over the microbatches of one update, as the engine does."""
    count = len(batches.weight)

    def body(carry, turn):
        index, moments = turn
        with in_microbatch(Microbatch(index, count, real=real)):
            return update(carry, moments), None

    return jax.lax.scan(body, carry, (jnp.arange(count), batches))[0]


@jax.jit
def one_update(running, batches, real=None):
    return over_microbatches(
        functools.partial(update_running, momentum=MOMENTUM), running, batches, real
    )


@jax.jit
def one_standing_update(carry, batches, real=None):
    def update(carry, moments):
        return update_standing(carry[0], moments, carry[1])

    return over_microbatches(update, carry, batches, real)


@pytest.mark.parametrize("real_examples", [1, 5, 9, 16])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_running_statistics_average_the_microbatches_that_hold_real_examples(
    cut, real_examples
):
    *_, k = cut
    with jax.enable_x64(True):
        x, params, probe, real = case(real_examples)
        start = RunningMoments(jnp.full(FEATURES, 5.0), jnp.full(FEATURES, 7.0))
        expected = running_by_definition(x, real, cut, start)
        batches = [each[3] for each in microbatches(cut, x, params, probe, real)]
        holds = np.array([real[rows].any() for rows in np.split(np.arange(16), k)])
        running = one_update(start, stacked(batches), holds)
    np.testing.assert_allclose(running, expected, rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_windows_without_a_real_example_normalise_to_zero(mode):
    x, params, probe, _ = jax.tree.map(np.float32, case(16))
    y, x_grad, params_grad, _ = one_microbatch(mode, 4)(
        np.where(np.arange(16)[:, None, None] % 2, np.inf, np.nan).astype("f") * x,
        params,
        probe,
        np.zeros(16, np.float32),
    )
    for found in (y, x_grad, *params_grad):
        np.testing.assert_array_equal(found, 0)


def batches_of(means, empty=()):
    """Return moments of microbatches, those of index `empty` without weight."""
    shape = (len(means), 1, 2)
    mean = np.broadcast_to(np.reshape(means, (-1, 1, 1)), shape).astype(np.float32)
    weight = [[0.0 if index in empty else 3.0] for index in range(len(means))]
    return Moments(mean, 2 * mean, np.asarray(weight, np.float32))


ODD = RunningMoments(np.float32([0.1, 1 / 3]), np.float32([0.7, 1e-3]))
MEANS = [1.0, 3.0, 8.0, 4.0]


@pytest.mark.parametrize("empty", [(), (3,), (2, 3), (1, 2, 3), (0,), (0, 2)])
def test_empty_microbatches_that_are_known_move_nothing(empty):
    real = np.array([index not in empty for index in range(4)])
    found = one_update(ODD, batches_of(MEANS, empty), real)
    new = np.asarray(MEANS)[real].mean()
    for old, each, factor in zip(ODD, found, (1, 2), strict=True):
        expected = MOMENTUM * old + (1 - MOMENTUM) * factor * new
        np.testing.assert_allclose(each, expected, rtol=1e-6)


def test_padding_alone_moves_nothing_in_a_norm_without_weights():
    real = np.array([True, True, False, False])
    found = one_update(ODD, batches_of([1.0, 3.0, 99.0, 99.0]), real)
    expected = MOMENTUM * ODD.mean + (1 - MOMENTUM) * 2.0
    np.testing.assert_allclose(found.mean, expected, rtol=1e-6)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_an_update_without_a_real_example_moves_no_bit(count, known):
    batches = batches_of([0.0] * count, range(count))
    real = np.zeros(count, bool) if known else None
    running = one_update(ODD, batches, real)
    standing, seen = one_standing_update((ODD, np.float32(7)), batches, real)
    for found in (running, standing):
        np.testing.assert_array_equal(found.mean, ODD.mean)
        np.testing.assert_array_equal(found.var, ODD.var)
    assert seen == 7


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_update_with_an_empty_microbatch_counts_once_in_standing_statistics(empty):
    real = np.arange(3) != empty
    carry = ODD, np.float32(0)
    for mean in (2.0, 5.0):
        carry = one_standing_update(carry, batches_of([mean] * 3, [empty]), real)
    np.testing.assert_allclose(carry[0].mean, 3.5, rtol=1e-6)
    assert carry[1] == 2


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_standing_statistics_forget_what_was_before_the_first_batch(empty):
    carry = ODD, np.float32(0)
    mean, seen = one_standing_update(carry, batches_of([6.0] * 3, [empty]))
    np.testing.assert_allclose(mean.mean, 6.0, rtol=1e-6)
    assert seen == 1
