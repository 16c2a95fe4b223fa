"""More programs that the proof must accept: solvers, searches and training.

They take what those of `wrong` take.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy.optimize import minimize
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

import replicator
from benchmarks.proof.wrong import AXIS, Program, loss
from replicator.base.types import PyTree
from replicator.nnx import BatchNorm


def mean(tree: PyTree) -> PyTree:
    """Return the mean over replicas."""
    return lax.pmean(tree, AXIS)


def mean_grad(w, x):
    return mean(jax.grad(loss)(w, x))


def _matvec(x):
    return lambda v: lax.psum(x.T @ (x @ v), AXIS) + v


def _trained(tx: optax.GradientTransformation, *, steps: int = 1) -> Program:
    """Return the program that trains on reduced gradients."""

    def program(x, w, key):
        state = tx.init(w)
        for _ in range(steps):
            updates, state = tx.update(mean_grad(w, x), state, w)
            w = optax.apply_updates(w, updates)
        return w, state

    return program


def _wrapped(x, w, key):
    optimizer = replicator.Replicator(num_replicas=4).wrap_optimizer(optax.adamw(0.1))
    return optimizer.update(jax.grad(loss)(w, x), optimizer.init(w), w)


def _searched(tx: optax.GradientTransformationExtraArgs) -> Program:
    """Return the program that searches along the loss of all examples."""

    def program(x, w, key):
        # The gradient of a mean over replicas is this replica's own: a rule of ours
        # reduces it, or a search by slopes would hang.
        @jax.custom_vjp
        def mean_loss(w):
            return mean(loss(w, x))

        mean_loss.defvjp(
            lambda w: (mean_loss(w), w), lambda w, g: (g * mean_grad(w, x),)
        )
        value, grad = jax.value_and_grad(mean_loss)(w)
        updates, _ = tx.update(
            grad, tx.init(w), w, value=value, grad=grad, value_fn=mean_loss
        )
        return w + updates

    return program


def _global_loss(x):
    return replicator.global_loss(
        lambda w: replicator.LocalSum(loss(w, x) * len(x), count=len(x))
    )


def _searched_globally(x, w, key):
    tx, mean_loss = optax.lbfgs(), _global_loss(x)
    value, grad = jax.value_and_grad(mean_loss)(w)
    given = {"value": value, "grad": grad, "value_fn": mean_loss}
    return w + tx.update(grad, tx.init(w), w, **given)[0]


def _skipped_together(x, w, key):
    grad = jax.grad(loss)(w, x)
    fine = lax.pmin(jnp.isfinite(grad).all().astype(jnp.int32), AXIS)
    return lax.cond(fine > 0, lambda: w - mean(grad), lambda: w)


def _root(x, w, key):
    def solve(f, guess):
        return lax.while_loop(
            lambda y: jnp.abs(f(y)) > 0.1, lambda y: y - f(y) / 2, guess
        )

    return lax.custom_root(
        lambda y: y - mean(x.mean()), 0.0, solve, lambda g, y: y / g(1.0)
    )


def _solved_implicitly(x, w, key):
    return jax.grad(lambda w: jnp.sin(cg(_matvec(x), w)[0]).sum())(w)


def _local_steps_averaged(x, w, key):
    def turn(w, row):
        return w - 0.1 * jax.grad(loss)(w, row[None]), None

    return mean(lax.scan(turn, w, x)[0])


def _largest_shared(x, w, key):
    values, places = lax.top_k(jnp.abs(x[0]), 2)
    shared = lax.all_gather((values, places), AXIS, tiled=True)
    return jnp.zeros(3).at[shared[1]].add(shared[0])


def _low_rank(x, w, key):
    basis = jnp.linalg.qr(lax.psum(x.T @ x, AXIS))[0]
    return basis @ lax.psum(basis.T @ x.T, AXIS)


def _clusters(x, w, key):
    def turn(centers, _):
        nearest = jax.nn.one_hot(
            jnp.abs(x[:, :1] - centers[None]).argmin(1), 3, dtype=x.dtype
        )
        totals = lax.psum((nearest.T @ x[:, 0], nearest.sum(0)), AXIS)
        return totals[0] / jnp.maximum(totals[1], 1), None

    return lax.scan(turn, w, None, length=4)[0]


def _power_iteration(x, w, key):
    def turn(_, v):
        v = lax.psum(x.T @ (x @ v), AXIS)
        return v / jnp.linalg.norm(v)

    return lax.fori_loop(0, 5, turn, w)


def _norm_of_all(x, w, key):
    norm = BatchNorm(3, rngs=nnx.Rngs(0))

    def batch_loss(norm):
        norm = nnx.clone(norm)
        return (norm(x) ** 3).sum(), nnx.state(norm, nnx.BatchStat)

    grads, stats = jax.grad(batch_loss, has_aux=True, allow_int=True)(norm)
    return mean(nnx.state(grads, nnx.Param)), stats


def _dropped_out(x, w, key):
    def drop(key, row):
        return row * jax.random.bernoulli(key, 0.5, (3,)).astype(row.dtype)

    keys = replicator.example_keys(key, 4)
    return mean_grad(w, jax.vmap(drop)(keys, x))


def _modules(x, w, key):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(key))
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    return jax.tree.map(lambda p, g: p - mean(g), nnx.state(model), nnx.state(grads))


def _heavy_tailed(x, w, key):
    # Its sampler rejects: a loop whose turns depend on equal numbers alone.
    return w + jax.random.poisson(key, 3.0, (3,)).astype(w.dtype)


_SOLVERS: dict[str, Program] = {
    "cg": lambda x, w, key: cg(_matvec(x), mean(x.mean(0)))[0],
    "cg with a preconditioner": lambda x, w, key: cg(
        _matvec(x), w, M=lambda v: v / mean(jnp.square(x).sum(0))
    )[0],
    "gmres": lambda x, w, key: gmres(_matvec(x), w)[0],
    "bicgstab": lambda x, w, key: bicgstab(_matvec(x), w, maxiter=9)[0],
    "a gradient through cg": _solved_implicitly,
    "cg on own data, averaged": lambda x, w, key: mean(
        cg(lambda v: x.T @ (x @ v) + v, x.mean(0))[0]
    ),
    "a dense system": lambda x, w, key: jnp.linalg.solve(
        lax.psum(x.T @ x, AXIS) + jnp.eye(3), w
    ),
    "a root": _root,
    "an equation run from equal values": lambda x, w, key: odeint(
        lambda y, t: -y * mean(x[0]), w, jnp.arange(2.0)
    ),
    "clusters": _clusters,
    "a power iteration": _power_iteration,
    "a low-rank gradient": _low_rank,
    "the largest of each, shared": _largest_shared,
}

_TRAINING: dict[str, Program] = {
    "a wrapped optimizer": _wrapped,
    "adam, many steps": _trained(optax.adamw(0.1), steps=2),
    "lamb, clipped": _trained(
        optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1))
    ),
    "adafactor": _trained(optax.adafactor(0.1)),
    "lookahead sums of steps": _trained(
        optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=2), steps=2
    ),
    "many small steps": _trained(
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), steps=2
    ),
    "a search along the loss of all": _searched(
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    ),
    "l-bfgs": _searched(
        optax.chain(
            optax.scale_by_lbfgs(),
            optax.scale_by_zoom_linesearch(5, initial_guess_strategy="one"),
        )
    ),
    "a step that all skip": _skipped_together,
    "a search along `global_loss`": _searched_globally,
    "curvature": lambda x, w, key: (
        minimize(_global_loss(x), w, method="BFGS", options={"maxiter": 3}).x
    ),
    "local steps, averaged": _local_steps_averaged,
    "the norm of all": _norm_of_all,
    "modules": _modules,
    "dropout by example": _dropped_out,
    "noise on weights": lambda x, w, key: w + jax.random.normal(key, (3,)),
    "noise by a sampler that rejects": _heavy_tailed,
    "a coin thrown for all": lambda x, w, key: lax.cond(
        jax.random.bernoulli(key), lambda: mean(x[0]), lambda: w
    ),
    "numbers of each replica's own, averaged": lambda x, w, key: mean(
        jax.random.normal(replicator.replica_key(key), (3,))
    ),
    "a vote": lambda x, w, key: jnp.sign(lax.psum(jnp.sign(x.mean(0)), AXIS)),
}

RIGHT_TRAINING = _SOLVERS | _TRAINING
