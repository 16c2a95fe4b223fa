"""Programs that hang: some replicas reach a collective that others do not.

The proof must refuse each, for the collective: none of them is ever run. They take what
those of `wrong` take.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy.optimize import minimize
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

import replicator
from benchmarks.proof.wrong import AXIS, Program, loss
from replicator.base.types import PyTree
from replicator.collectives.permute import ring_pairs


def _summed(x):
    return lax.psum(x, AXIS)


def _matvec(x):
    return lambda v: lax.psum(x.T @ (x @ v), AXIS) + v


def _solved_backwards(x, w, key):
    # The right side is equal; its cotangent, for which the transposed system is solved,
    # is this replica's own.
    def own_loss(w):
        return (x @ cg(_matvec(x), w)[0]).sum()

    return lax.pmean(jax.grad(own_loss)(w), AXIS)


def _preconditioned(x, w, key):
    return cg(lambda v: 2 * v, x.mean(0), M=lambda v: lax.pmean(v, AXIS))[0]


def _own_newton(x, w, key):
    def turn(w):
        return w - 0.1 * lax.pmean(jax.grad(loss)(w, x), AXIS)

    return lax.while_loop(lambda w: loss(w, x) > 0.1, turn, w)


def _own_slope(x, w, key):
    # All agree on the loss; its gradient by JAX, a search's slope, is each one's own.
    tx = optax.scale_by_zoom_linesearch(5, initial_guess_strategy="one")
    value, grad = jax.value_and_grad(loss)(w, x)
    grad = lax.pmean(grad, AXIS)
    updates, _ = tx.update(
        -grad,
        tx.init(w),
        w,
        value=lax.pmean(value, AXIS),
        grad=grad,
        value_fn=lambda w: lax.pmean(loss(w, x), AXIS),
    )
    return w + updates


def _own_search(x, w, key):
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    value, grad = jax.value_and_grad(loss)(w, x)
    updates, _ = tx.update(
        grad,
        tx.init(w),
        w,
        value=value,
        grad=grad,
        value_fn=lambda w: lax.pmean(loss(w, x), AXIS),
    )
    return lax.pmean(w + updates, AXIS)


def _skipped_alone(x, w, key):
    grad = jax.grad(loss)(w, x)
    return lax.cond(
        jnp.isfinite(grad).all(), lambda: w - replicator.all_reduce(grad), lambda: w
    )


def _decided_in_a_mutable_array(x, w, key):
    ref = jax.new_ref(w)
    ref[...] = x.mean(0)
    return lax.cond(ref[0] > 0, lambda: _summed(w), lambda: w)


def _decided_in_the_second_turn(x, w, key):
    return lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[1], x.sum(), _summed(c[2])), (1.0, 1.0, w)
    )[2]


def _nested(x, w, key):
    def turn(c, row):
        inner = functools.partial(lax.fori_loop, 0, 3, lambda _, c: _summed(c) / 9)
        return lax.cond(row[0] > 0, inner, lambda c: c, c), None

    return lax.scan(turn, w, x)[0]


def _own_root(x, w, key):
    def solve(f, guess):
        return lax.while_loop(
            lambda y: jnp.abs(f(y)) > 0.1, lambda y: y - f(y) / 2, guess
        )

    return lax.custom_root(
        lambda y: lax.pmean(y, AXIS) - x.mean(), 0.0, solve, lambda g, y: y / g(1.0)
    )


@jax.custom_vjp
def _gathered(v):
    return lax.all_gather(v, AXIS).sum(0)


_gathered.defvjp(lambda v: (_gathered(v), None), lambda _, g: (lax.pmean(g, AXIS),))


def _by_callback(x, w, key):
    shape = jax.ShapeDtypeStruct((), np.bool_)
    flag = jax.pure_callback(lambda x: np.bool_(x.sum() > 0), shape, x)
    return lax.cond(flag, lambda: _summed(w), lambda: w)


def _trained_if(x, w, key) -> PyTree:
    optimizer = replicator.Replicator(num_replicas=4).wrap_optimizer(optax.sgd(0.1))
    state = optimizer.init(w)
    return lax.cond(
        x[0, 0] > 0,
        lambda: optimizer.update(jax.grad(loss)(w, x), state, w)[0],
        lambda: w,
    )


DEADLOCKS: dict[str, Program] = {
    "turns counted by data": lambda x, w, key: lax.while_loop(
        lambda c: c.sum() < x.sum(), lambda c: _summed(c), w
    ),
    "a condition that reduces, compared with data": lambda x, w, key: lax.while_loop(
        lambda c: _summed(c).sum() < x.sum(), lambda c: 2 * c, w
    ),
    "turns bounded by data": lambda x, w, key: lax.fori_loop(
        0,
        x.sum().astype(jnp.int32),
        lambda _, c: replicator.permute(c, ring_pairs()),
        w,
    ),
    "decided in the second turn": _decided_in_the_second_turn,
    "a branch by data": lambda x, w, key: lax.cond(
        x[0, 0] > 0, lambda: _summed(w), lambda: w
    ),
    "a switch by data": lambda x, w, key: lax.switch(
        x[0, 0].astype(int), [lambda: w, lambda: w, lambda: lax.pmax(w, AXIS)]
    ),
    "a branch by place": lambda x, w, key: lax.cond(
        lax.axis_index(AXIS) == 0, lambda: lax.all_gather(x, AXIS).sum(), lambda: 0.0
    ),
    "a call in a branch": lambda x, w, key: lax.cond(
        x[0, 0] > 0, jax.jit(jax.checkpoint(_gathered)), lambda v: v, w
    ),
    "the gradient of a branch": lambda x, w, key: jax.grad(
        lambda w: lax.cond(x[0, 0] > 0, lambda: _gathered(w).sum(), lambda: w.sum())
    )(w),
    "a loop in a branch in a loop": _nested,
    "cg for data": lambda x, w, key: cg(_matvec(x), x.mean(0))[0],
    "gmres for data": lambda x, w, key: gmres(_matvec(x), x.mean(0))[0],
    "bicgstab for data": lambda x, w, key: bicgstab(_matvec(x), x.mean(0))[0],
    "cg from data": lambda x, w, key: cg(_matvec(x), w, x0=x.mean(0))[0],
    "cg for a cotangent": _solved_backwards,
    "a preconditioner that reduces": _preconditioned,
    "cg under jit under vmap": lambda x, w, key: jax.vmap(
        jax.jit(lambda b: cg(_matvec(x), b)[0])
    )(x),
    "a root of one's own": _own_root,
    "an equation run from data": lambda x, w, key: odeint(
        lambda y, t: -lax.pmean(y, AXIS), x.mean(0), jnp.arange(2.0)
    ),
    "newton until one's own loss is small": _own_newton,
    "a search along one's own loss": _own_search,
    "a search along one's own slope": _own_slope,
    "curvature of one's own": lambda x, w, key: (
        minimize(lambda w: lax.pmean(loss(w, x), AXIS), w, method="BFGS").x
    ),
    "a step that some skip": _skipped_alone,
    "an optimizer that some ask": _trained_if,
    "decided in a mutable array": _decided_in_a_mutable_array,
    "decided by a callback": _by_callback,
}
