"""Programs whose result is the same on every replica: the proof must accept each.

They take what those of `wrong` take. `python -m benchmarks.proof` runs each to
see that it is right indeed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import pallas_call, run_state

import replicator
from benchmarks.proof.right_training import RIGHT_TRAINING, mean, mean_grad
from benchmarks.proof.wrong import AXIS, Program, loss
from replicator.collectives.permute import ring_pairs


def _newton(x, w, key):
    def turn(carry):
        w, _ = carry
        grad = mean_grad(w, x)
        return w - 0.05 * grad, jnp.abs(grad).max()

    return lax.while_loop(lambda c: c[1] > 1.0, turn, (w, jnp.inf))[0]


def _private_gradients(x, w, key):
    grads = jax.vmap(jax.grad(loss), (None, 0))(w, x[:, None])
    norms = jnp.linalg.norm(grads, axis=1, keepdims=True)
    return lax.psum((grads / jnp.maximum(1.0, norms)).sum(0), AXIS)


def _sharded_update(x, w, key):
    grad = jnp.concatenate([jax.grad(loss)(w, x), jnp.zeros(1)])
    own = lax.psum_scatter(grad, AXIS, tiled=True)
    return lax.all_gather(own * 0.1 / lax.axis_size(AXIS), AXIS, tiled=True)


@jax.custom_vjp
def _synced(x):
    return mean(x.mean(0))


_synced.defvjp(
    lambda x: (_synced(x), x), lambda x, g: (mean(g)[None] * jnp.ones_like(x) / 4,)
)


@jax.custom_jvp
def _kept(w):
    return w * 2


_kept.defjvp(lambda primals, tangents: (_kept(*primals), tangents[0] * 2))


def _doubled(value):
    def kernel(given, found):
        found[...] = given[...] * 2

    shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return pallas_call(kernel, out_shape=shape, interpret=True)(value)


def _written(write: Callable) -> Program:
    """Return the program whose result is what `write` leaves in a mutable array."""

    def program(x, w, key):
        ref = jax.new_ref(w)
        write(ref, x, w)
        return jax.freeze(ref)

    return program


def _set(ref, value):
    ref[...] = value


def _beside_another(ref, x, w):
    own = jax.new_ref(x)
    own[...] = x * 2
    ref[0] = 3.0
    lax.cond(x[0, 0] > 0, lambda: _set(own, x), lambda: None)


def _overwritten(ref, x, w):
    ref[...] = x.mean(0)
    ref[...] = mean(ref[...])


def _reduced_in_a_loop(ref, x, w):
    def turn(_, row):
        jax.jit(lambda ref, row: _set(ref, mean(ref[...] + row)))(ref, row)

    lax.scan(lambda c, row: (turn(c, row), None), None, x)


def _state_of_two(x, w, key):
    def body(refs):
        refs[0][...] = refs[0][...] * 2
        refs[1][...] = refs[1][...] + refs[0][...][None]

    return run_state(body)((w, x))[0]


def _ring_of_maxima(x, w, key):
    pairs = [(i, (i + 1) % 4) for i in range(4)]
    best = x
    for _ in range(3):
        best = jnp.maximum(x, lax.ppermute(best, AXIS, pairs))
    return best


def _loop_carrying_both(x, w, key):
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, 2 * c[1], c[2] * w[None]), (0, w, x)
    )[1]


_FULL_RING = [(0, 2), (2, 1), (1, 3), (3, 0)]

_COLLECTIVES: dict[str, Program] = {
    "a sum": lambda x, w, key: lax.psum(x, AXIS),
    "a tree of means": lambda x, w, key: mean({"a": x, "b": [x * w[None]]}),
    "extremes": lambda x, w, key: (lax.pmax(x, AXIS), lax.pmin(x, AXIS)),
    "a gather": lambda x, w, key: lax.all_gather(x, AXIS),
    "a broadcast": lambda x, w, key: replicator.broadcast(x),
    "an ordered sum": lambda x, w, key: replicator.all_reduce(
        x, "sum", reduction="ordered"
    ),
    "a weighted mean": lambda x, w, key: replicator.all_reduce(
        x, weight=jnp.abs(x).sum()
    ),
    "a product": lambda x, w, key: replicator.all_reduce(x, "product"),
    "work shared out": lambda x, w, key: replicator.map_reduce(
        lambda item: item * w, [jnp.ones(3)] * 3
    ),
    "a sum of halves, gathered": lambda x, w, key: lax.all_gather(
        lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]]), AXIS
    ),
    "an exchange, gathered": lambda x, w, key: lax.all_gather(
        lax.all_to_all(x, AXIS, 0, 0), AXIS
    ),
    "the largest of a group of equal values": lambda x, w, key: lax.pmax(
        w, AXIS, axis_index_groups=[[0, 1], [2, 3]]
    ),
    "one's own value alone, summed": lambda x, w, key: lax.psum(
        jnp.where(lax.axis_index(AXIS) == 2, x, 0.0), AXIS
    ),
    "a full ring of equal values": lambda x, w, key: lax.ppermute(w, AXIS, _FULL_RING),
    "a shuffle of equal values": lambda x, w, key: replicator.permute(
        {"w": w}, ring_pairs(-1)
    ),
    "a ring of maxima": _ring_of_maxima,
    "a scattered update, gathered": _sharded_update,
    "collectives under vmap": lambda x, w, key: jax.vmap(mean)(x),
    "a sum over two axes": lambda x, w, key: jax.vmap(
        lambda row: lax.psum(row, ("rows", AXIS)), axis_name="rows"
    )(x),
}

_CONTROL: dict[str, Program] = {
    "a branch on a sum": lambda x, w, key: lax.cond(
        lax.psum(x[0, 0], AXIS) > 0, lambda: w, lambda: mean(x[0])
    ),
    "a switch on a maximum": lambda x, w, key: lax.switch(
        lax.pmax(x[0, 0], AXIS).astype(int) % 2, [lambda: mean(x[0]), lambda: w]
    ),
    "a loop on a mean": _newton,
    "a loop that carries both kinds": _loop_carrying_both,
    "a scan carry reduced in each turn": lambda x, w, key: lax.scan(
        lambda c, row: (mean(c + row), None), x[0], x
    )[0],
    "a loop carry reduced in each turn": lambda x, w, key: lax.fori_loop(
        0, 3, lambda _, c: mean(c * w), x.mean(0)
    ),
    "a scan carry reduced a turn late": lambda x, w, key: lax.scan(
        lambda c, row: ((c[1], mean(c[0] + row)), None), (x[0], x[1]), x
    )[0],
    "a scan that reduces its outputs": lambda x, w, key: lax.scan(
        lambda c, row: (c, lax.psum(row, AXIS)), w, x
    ),
    "a branch on data whose result is reduced": lambda x, w, key: mean(
        lax.cond(x[0, 0] > 0, lambda: w, lambda: 2 * w)
    ),
    "a branch on data beside what is equal": lambda x, w, key: lax.cond(
        mean(x[0, 0]) > 0,
        lambda: (lax.cond(x[0, 0] > 0, lambda: x, lambda: -x), w),
        lambda: (x, 2 * w),
    )[1],
    "a map over gathered rows": lambda x, w, key: lax.map(
        lambda row: row @ w, lax.all_gather(x, AXIS, tiled=True)
    ),
    "a prefix over gathered rows": lambda x, w, key: lax.associative_scan(
        jnp.multiply, lax.all_gather(x, AXIS)
    ),
    "a combiner of one's own": lambda x, w, key: lax.reduce(
        w, 0.0, lambda a, b: a + 2 * b, (0,)
    ),
    "a kernel of one's own": lambda x, w, key: _doubled(w),
    "a window of one's own": lambda x, w, key: lax.reduce_window(
        w, 0.0, lambda a, b: a + 2 * b, (2,), (1,), "VALID"
    ),
    "a barrier over both kinds": lambda x, w, key: lax.optimization_barrier(
        {"x": x, "w": w}
    )["w"],
    "a callback of equal values": lambda x, w, key: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct((3,), np.float32), mean(x[0])
    ),
    "either platform": lambda x, w, key: lax.platform_dependent(
        w, cpu=jnp.sin, default=jnp.cos
    ),
    "keys sorted beside data": lambda x, w, key: lax.sort((w, x[0]), num_keys=1)[0],
    "the largest of what is equal": lambda x, w, key: lax.top_k(mean(x[0]), 2),
    "a slice where a sum says": lambda x, w, key: lax.dynamic_slice(
        w, (lax.pmax(x[0, 0], AXIS).astype(int),), (2,)
    ),
    "an element changed": lambda x, w, key: w.at[1].apply(jnp.sin).at[0].add(1.0),
    "shapes of data": lambda x, w, key: w * x.shape[0],
}

_ARRAYS: dict[str, Program] = {
    "an array written beside another": _written(_beside_another),
    "an array overwritten with a mean": _written(_overwritten),
    "an array reduced in a loop": _written(_reduced_in_a_loop),
    "an array written in a branch": _written(
        lambda ref, x, w: lax.cond(
            mean(x).sum() > 0, lambda: _set(ref, 2 * w), lambda: None
        )
    ),
    "one array of two in a state": _state_of_two,
}

_DERIVATIVES: dict[str, Program] = {
    "a reduced gradient": lambda x, w, key: w - mean_grad(w, x),
    "a gradient recomputed": lambda x, w, key: mean(
        jax.grad(jax.checkpoint(loss))(w, x)
    ),
    "a backward rule that reduces": lambda x, w, key: mean(
        jax.grad(lambda w: (_synced(x * w[None]) ** 2).sum())(w)
    ),
    "a forward rule": lambda x, w, key: jax.jacfwd(_kept)(w),
    "a product with the hessian": lambda x, w, key: mean(
        jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (w,))[1]
    ),
    "gradients clipped one by one": _private_gradients,
    "a gradient through a scan that reduces": lambda x, w, key: mean(
        jax.grad(
            lambda w: lax.scan(lambda c, row: (mean(c * row), None), w, x)[0].sum()
        )(w)
    ),
}

RIGHT = _COLLECTIVES | _CONTROL | _ARRAYS | _DERIVATIVES | RIGHT_TRAINING
