"""Programs whose result differs between replicas: the proof must refuse each.

Each takes `x` [4, 3], other examples on each replica, `w` [3], the same on all, and a
key, the same on all; four replicas run it. `python -m benchmarks.proof` runs each to
see that it is wrong indeed.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.experimental import io_callback
from jax.experimental.ode import odeint
from jax.experimental.pallas import run_state
from jax.ref import addupdate, swap
from jax.scipy.sparse.linalg import cg

import replicator
from replicator.base.types import PyTree
from replicator.collectives.permute import ring_pairs

AXIS = "replica"
Program = Callable[[jax.Array, jax.Array, jax.Array], PyTree]

_calls = itertools.count()


def index() -> jax.Array:
    """Return this replica's place as a float."""
    return lax.axis_index(AXIS).astype(jnp.float32)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the mean error of a linear model on the examples `x`."""
    return ((x @ w - x.sum(1)) ** 2).mean()


@jax.custom_vjp
def _leaks_backwards(w):
    return w * w


_leaks_backwards.defvjp(lambda w: (w * w, w), lambda w, g: (g * w * (1 + index()),))


@jax.custom_jvp
def _leaks_forwards(w, x):
    return w.sum()


_leaks_forwards.defjvp(
    lambda primals, tangents: (
        _leaks_forwards(*primals),
        (tangents[0] * primals[1].mean(0)).sum(),
    )
)


@jax.custom_batching.custom_vmap
def _own_vmap(w, x):
    return w * x


@_own_vmap.def_vmap
def _(axis_size, in_batched, w, x):
    return w + x.sum(0) * jnp.ones((axis_size, 1)), True


def _crosswise(a, b):
    return a[0] + b[1], a[1] + b[0]


def _run_state(write: Callable) -> Program:
    return lambda x, w, key: run_state(lambda ref: write(ref, x, w))(w)


def _written(write: Callable) -> Program:
    """Return the program whose result is what `write` leaves in a mutable array."""

    def program(x, w, key):
        ref = jax.new_ref(w)
        write(ref, x, w)
        return jax.freeze(ref)

    return program


def _set(ref, value):
    ref[...] = value


def _written_in_a_loop(ref, x, w):
    lax.scan(lambda c, row: (_set(ref, ref[...] + row), None), None, x)


def _written_in_a_call(ref, x, w):
    jax.jit(lambda ref, x: _set(ref, ref[...] * x.mean(0)))(ref, x)


def _written_in_turns(ref, x, w):
    lax.while_loop(
        lambda c: c < x.sum(),
        lambda c: (_set(ref, ref[...] + w), c + 0.3)[1],
        -5.0,
    )


def _swapped(x, w, key):
    ref = jax.new_ref(x.mean(0))
    return swap(ref, ..., w)


def _unwrapped(tx: optax.GradientTransformation) -> Program:
    def program(x, w, key):
        updates, state = tx.update(jax.grad(loss)(w, x), tx.init(w), w)
        return optax.apply_updates(w, updates), state

    return program


def _line_search(x, w, key):
    tx = optax.chain(optax.sgd(9.0), optax.scale_by_backtracking_linesearch(15))
    value, grad = jax.value_and_grad(loss)(w, x)
    mean = lax.pmean(grad, AXIS)
    updates, _ = tx.update(
        mean, tx.init(w), w, value=value, grad=mean, value_fn=lambda w: loss(w, x)
    )
    return w + updates


def _clipped_by_own_norm(x, w, key):
    grad = jax.grad(loss)(w, x)
    return w - lax.pmean(grad, AXIS) / jnp.linalg.norm(grad)


def _norm_of_own_batch(x, w, key):
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    norm(x)
    return nnx.state(norm, nnx.BatchStat)


def _own_root(x, w, key):
    return lax.custom_root(
        lambda y: y - x.mean(),
        0.0,
        lambda f, guess: lax.fori_loop(0, 9, lambda _, y: y - f(y) / 2, guess),
        lambda g, y: y / g(1.0),
    )


def _solved_by_index(x, w, key):
    factor = index() + 1
    return lax.custom_linear_solve(
        lambda v: v * factor, w, lambda _, b: b / factor, symmetric=True
    )


def _late_in_a_loop(x, w, key):
    return lax.while_loop(
        lambda c: c[0] < 4,
        lambda c: (c[0] + 1, c[2], c[3], x.mean(0)),
        (0, w, w, w),
    )[1]


def _branch_decided_late(x, w, key):
    def turn(carry, _):
        flag, value = carry
        return (x.sum(), lax.cond(flag > 0, lambda: value, lambda: 2 * value)), None

    return lax.scan(turn, (1.0, w), None, length=3)[0][1]


def _local_steps(x, w, key):
    turn = jax.checkpoint(lambda w, row: (w - 0.1 * jax.grad(loss)(w, row[None]), None))
    return lax.scan(turn, w, x)[0]


def _random_by_data(x, w, key):
    own = jax.random.fold_in(key, lax.bitcast_convert_type(x.sum(), jnp.int32))
    return jax.random.normal(own, (3,))


def _counted(x, w, key):
    return io_callback(
        lambda: np.float32(next(_calls)), jax.ShapeDtypeStruct((), np.float32)
    )


def _called_back(x, w, key):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4, 3), np.float32), x)


_HALVES = [[0, 1], [2, 3]]

WRONG: dict[str, Program] = {
    "the batch's mean": lambda x, w, key: x.mean(0),
    "a gradient that nobody reduced": lambda x, w, key: w - jax.grad(loss)(w, x),
    "one of two reduced": lambda x, w, key: (lax.psum(x, AXIS), x),
    "a sum with one's own added": lambda x, w, key: lax.psum(x, AXIS) + x,
    "the place of a replica": lambda x, w, key: w * index(),
    "a sum over halves": lambda x, w, key: lax.psum(x, AXIS, axis_index_groups=_HALVES),
    "a gather over halves": lambda x, w, key: lax.all_gather(
        x, AXIS, axis_index_groups=_HALVES
    ),
    "unequal groups": lambda x, w, key: replicator.all_reduce(
        w, "sum", groups=[[0], [1, 2, 3]]
    ),
    "a scattered sum": lambda x, w, key: lax.psum_scatter(x, AXIS, tiled=True),
    "an exchange of equal values": lambda x, w, key: lax.all_to_all(
        jnp.arange(4.0), AXIS, 0, 0
    ),
    "a chain that is no ring": lambda x, w, key: lax.ppermute(
        w, AXIS, [(0, 1), (1, 2), (2, 3)]
    ),
    "a ring of own values": lambda x, w, key: replicator.permute(x, ring_pairs()),
    "one's own of what was gathered": lambda x, w, key: lax.all_gather(x, AXIS)[
        lax.axis_index(AXIS)
    ],
    "a choice by place": lambda x, w, key: jnp.where(index() == 0, w, 2 * w),
    "a branch by data": lambda x, w, key: lax.cond(
        x[0, 0] > 0, lambda: w, lambda: 2 * w
    ),
    "a switch by data": lambda x, w, key: lax.switch(
        jnp.abs(10 * x[0, 0]).astype(jnp.int32) % 3,
        [lambda: w, lambda: 2 * w, lambda: 3 * w],
    ),
    "turns counted by data": lambda x, w, key: lax.while_loop(
        lambda c: c.sum() < 50 + 40 * x.mean(), lambda c: c * 1.01, jnp.abs(w) + 1
    ),
    "turns bounded by data": lambda x, w, key: lax.fori_loop(
        0, jnp.abs(10 * x[0, 0]).astype(jnp.int32), lambda _, c: c * 1.1, w
    ),
    "late in a loop": _late_in_a_loop,
    "a branch decided late": _branch_decided_late,
    "outputs of a scan whose carry is reduced": lambda x, w, key: lax.scan(
        lambda c, row: (lax.pmean(c + row, AXIS), row), w, x
    ),
    "a carry reduced too early": lambda x, w, key: lax.scan(
        lambda c, row: (lax.pmean(c, AXIS) + row, None), w, x
    )[0],
    "a reducing scan of no turns": lambda x, w, key: lax.scan(
        lambda c, _: (lax.pmean(c, AXIS), None), x, None, length=0
    )[0],
    "steps of one's own": _local_steps,
    "a map over examples": lambda x, w, key: lax.map(jnp.sin, x),
    "a prefix over examples": lambda x, w, key: lax.associative_scan(
        lambda a, b: a * b + b, x
    ),
    "a combiner that mixes both": lambda x, w, key: lax.reduce(
        (w, x[0]), (0.0, 0.0), _crosswise, (0,)
    )[0],
    "a combiner of examples": lambda x, w, key: lax.reduce(
        x, 0.0, lambda a, b: a + 2 * b, (0,)
    ),
    "a reduction that begins with data": lambda x, w, key: lax.reduce(
        w, x.sum(), lambda a, b: jnp.maximum(a, 2 * b), (0,)
    ),
    "a window that mixes both": lambda x, w, key: lax.reduce_window(
        (w, x[0]), (0.0, 0.0), _crosswise, (2,), (1,), "VALID"
    )[0],
    "a window over examples": lambda x, w, key: lax.reduce_window(
        x[:, 0], 0.0, lambda a, b: a + 2 * b, (2,), (1,), "VALID"
    ),
    "an element set to data": lambda x, w, key: w.at[0].set(x[0, 0]),
    "a state run with data": _run_state(lambda ref, x, w: _set(ref, x.mean(0))),
    "a state run by place": _run_state(
        lambda ref, x, w: _set(ref, ref[...] * (1 + index()))
    ),
    "a state run by a branch": _run_state(
        lambda ref, x, w: lax.cond(x[0, 0] > 0, lambda: _set(ref, 2 * w), lambda: None)
    ),
    "an array written with data": _written(lambda ref, x, w: _set(ref, x.mean(0))),
    "an array added to": _written(lambda ref, x, w: addupdate(ref, ..., x.mean(0))),
    "an array written in part": _written(lambda ref, x, w: ref.__setitem__(0, x[0, 0])),
    "an array written in a loop": _written(_written_in_a_loop),
    "an array written in a call": _written(_written_in_a_call),
    "an array written in a branch": _written(
        lambda ref, x, w: lax.cond(x[0, 0] > 0, lambda: _set(ref, 2 * w), lambda: None)
    ),
    "an array written in counted turns": _written(_written_in_turns),
    "an array written where data says": _written(
        lambda ref, x, w: ref.__setitem__(jnp.abs(9 * x[0, 0]).astype(int) % 3, 9.0)
    ),
    "what an array held": _swapped,
    "a system solved for data": lambda x, w, key: cg(
        lambda v: 2 * v, x.mean(0), maxiter=3
    )[0],
    "a system solved by place": _solved_by_index,
    "a system made of data": lambda x, w, key: jnp.linalg.solve(
        x[:3] + 9 * jnp.eye(3), w
    ),
    "a root found for data": _own_root,
    "an equation run from data": lambda x, w, key: odeint(
        lambda y, t: -y, x.mean(0), jnp.arange(2.0)
    ),
    "a backward rule that knows its place": lambda x, w, key: jax.grad(
        lambda w: _leaks_backwards(w).sum()
    )(w),
    "a forward rule that takes data in": lambda x, w, key: jax.grad(_leaks_forwards)(
        w, x
    ),
    "a batching rule that takes data in": lambda x, w, key: jax.vmap(
        _own_vmap, (0, None)
    )(w[None], x.mean(0)),
    "a gradient recomputed": lambda x, w, key: jax.grad(jax.checkpoint(loss))(w, x),
    "a gradient through a reduced loss": lambda x, w, key: jax.grad(
        lambda w: lax.pmean(loss(w, x), AXIS)
    )(w),
    "a tangent of data": lambda x, w, key: jax.jvp(lambda w: x @ w, (w,), (w,))[1],
    "a plain sgd": _unwrapped(optax.sgd(0.1)),
    "a plain adam": _unwrapped(optax.adam(0.1)),
    "a search along one's own loss": _line_search,
    "a step clipped by one's own norm": _clipped_by_own_norm,
    "statistics of one replica": _norm_of_own_batch,
    "numbers of a replica's own": lambda x, w, key: jax.random.normal(
        replicator.replica_key(key), (3,)
    ),
    "numbers of each example's own": lambda x, w, key: jax.vmap(jax.random.normal)(
        replicator.example_keys(key, 4)
    ),
    "numbers by data": _random_by_data,
    "a callback of data": _called_back,
    "a callback that counts": _counted,
    "the largest examples": lambda x, w, key: lax.top_k(x[:, 0], 2)[0],
    "an order by data": lambda x, w, key: w[jnp.argsort(x[0])],
    "sorted by data": lambda x, w, key: lax.sort((x[0], w), num_keys=1)[1],
    "a slice where data says": lambda x, w, key: lax.dynamic_slice(
        jnp.arange(9.0), (jnp.abs(50 * x[0, 0]).astype(int) % 7,), (2,)
    ),
    "a sum over another axis": lambda x, w, key: jax.vmap(
        lambda row: lax.psum(row, "rows"), axis_name="rows"
    )(x)[0],
    "the other operand of a barrier": lambda x, w, key: lax.optimization_barrier(
        (w, x)
    )[1],
    "either platform": lambda x, w, key: lax.platform_dependent(
        x, cpu=jnp.sin, default=jnp.cos
    ),
    "a spectrum of data": lambda x, w, key: jnp.abs(jnp.fft.fft(x[:, 0])),
}
