"""What is written, shifted or convolved in groups, in pieces, is that of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicator import Replicator, strategies
from tests.steps import normals

ROWS, WIDTH = 32, 8
batch = {"x": np.asarray(normals(ROWS, WIDTH, seed=3))}
CUT = {"whole_below_bytes": 0}


def advantages(w, x):
    values = jnp.tanh(x @ w[:WIDTH])
    following = values.at[:-1].set(values[1:]).at[-1].set(0.5)
    return jnp.square(following - 0.9 * values).sum()


def stencil(w, x):
    y = x @ w[:WIDTH]
    return jnp.square(y.at[1:-1].add(y[2:]).at[0].set(1.0).at[-1].set(2.0)).sum()


def clamped(w, x):
    start = (jnp.int32(-ROWS - 2), jnp.int32(0))
    return jnp.square(lax.dynamic_update_slice(w, x[:3], start)).sum()


def shifted(w, x):
    del x
    return (lax.pad(w, 0.0, ((1, -1, 0), (0, 0, 0))) * w).sum()


def past_the_end(w, x):
    place = jnp.argmax(x[:, 0]) + ROWS
    return jnp.square(w[place]).sum()


def gradient(loss):
    return lambda w, x: w - 0.1 * jax.grad(loss)(w, x)


def clipped(w, x):
    """Return what DP-SGD takes: clipped gradients of each example's convolution."""

    def loss(w, row):
        image, kernel = row.reshape(1, 2, 2, 2), w.reshape(2, 2, 2, ROWS)
        y = lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.square(y).sum()

    each = jax.vmap(jax.grad(loss), (None, 0))(w, x)
    norm = jnp.sqrt(jnp.square(each).sum((1, 2), keepdims=True))
    return w - 0.1 * (each / jnp.maximum(norm, 1.0)).mean(0)


def written(w, x):
    return w.at[0].set(x[0]).at[1].set(x[1])


PATTERNS = {
    "next values of an activation": gradient(advantages),
    "a stencil of an activation": gradient(stencil),
    "two writes behind a roll": lambda w, x: jnp.roll(written(w, x), 3, 0),
    "two writes behind a cumsum": lambda w, x: jnp.cumsum(written(w, x), 0),
    "a gradient written and rolled": lambda w, x: (
        w - jnp.roll(jax.grad(advantages)(w, x).at[0].set(0.0), 1, 0)
    ),
    "an update that clamps": gradient(clamped),
    "a shift by pad": gradient(shifted),
    "a pad inside and a crop": lambda w, x: (
        w + lax.pad(w, 0.0, ((0, 0, 1), (0, 0, 0)))[:ROWS]
    ),
    "a lookup past the end": gradient(past_the_end),
    "a row by a function": lambda w, x: w.at[x[0, 0].astype(int) + 3].apply(jnp.tanh),
    "gradients of each example's convolution": clipped,
}


@pytest.mark.parametrize("which", PATTERNS)
def test_a_write_in_pieces_is_that_of_one_device(which):
    update, w = PATTERNS[which], normals(ROWS, WIDTH, seed=4)
    rep = Replicator(strategy=strategies.zero2(**CUT), compilation_cache=False)
    step = rep.compile(lambda state, batch: ({"w": update(state["w"], batch["x"])}, {}))
    found, _ = step(rep.put({"w": w}), batch)

    expected = jax.jit(update)(w, batch["x"])
    np.testing.assert_allclose(found["w"], expected, rtol=1e-5, atol=1e-5)


def test_a_queue_is_that_of_one_device_by_default():
    queue, rows = normals(256, 64, seed=5), {"x": batch["x"][:, :1]}
    rep = Replicator(strategy=strategies.zero2(), compilation_cache=False)

    def turned(queue, x):
        return jnp.roll(queue.at[0].set(x[0]).at[1].set(x[1]), 16, 0)

    step = rep.compile(lambda state, batch: ({"w": turned(state["w"], batch["x"])}, {}))
    found, _ = step(rep.put({"w": queue}), rows)
    np.testing.assert_array_equal(found["w"], turned(queue, rows["x"]))


def added_to_others(x):
    """Add rows that follow to others, at places of which one is named twice."""
    return x.at[jnp.array([0, 2, 4, 6, 1, 3, 5, 7, 2])].add(x[:9])


def sum_and_largest(x):
    """Pad one array twice, and not with the same number."""
    return jnp.cumsum(x, 0) + lax.cummax(x, 0)


def depthwise(x):
    kernel = jnp.cos(jnp.arange(64.0)).reshape(2, 2, 1, 16)

    def loss(kernel):
        y = lax.conv_general_dilated(
            x.reshape(-1, 2, 2, 2),
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )
        return jnp.square(y).sum()

    return jax.grad(loss)(kernel)


@pytest.mark.parametrize("update", [added_to_others, sum_and_largest, depthwise])
def test_what_is_made_of_a_batch_is_that_of_one_device_on_several_axes(update):
    rules = [strategies.Rule(pattern="*", stored=("model", "shard"))]
    strategy = strategies.Rules(rules, replica=2, shard=2, model=2, **CUT)
    rep = Replicator(strategy=strategy, compilation_cache=False)
    step = rep.compile(lambda state, batch: (state, {"y": update(batch["x"])}))
    _, found = step(rep.put({"w": normals(ROWS, WIDTH, seed=4)}), batch)

    expected = jax.jit(update)(batch["x"])
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-5)


def two_windows(w, x):
    del x
    largest = lax.reduce_window(w, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")
    return lax.reduce_window(w, 0.0, lax.add, (3, 1), (1, 1), "SAME") * largest


def test_windows_that_fill_otherwise_are_those_of_one_device():
    w = normals(ROWS, WIDTH, seed=4)
    rep = Replicator(strategy=strategies.zero2(**CUT), compilation_cache=False)
    step = rep.compile(lambda state, batch: ({"w": two_windows(state["w"], 0)}, {}))
    found, _ = step(rep.put({"w": w}), batch)

    np.testing.assert_allclose(found["w"], jax.jit(two_windows)(w, 0), rtol=1e-5)
