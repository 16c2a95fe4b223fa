"""Solvers: what is solved, searched or preconditioned with the examples of all.

They act on the whole batch at once, so they run at one microbatch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import replicator
from benchmarks.truth import masks, optimizers
from benchmarks.truth.law import cut_by
from benchmarks.truth.program import WHOLE, Program, Same, pair
from benchmarks.truth.tasks import MLP_WEIGHTS, vectors


def _batch(number: int):
    rng = np.random.default_rng(600 + number)
    return vectors(rng) | {"mask": masks.scattered(rng)}


def _sums(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    losses = (hidden @ params["w2"] - batch["y"]) ** 2
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def _local(params, batch):
    return replicator.LocalSum(*_sums(params, batch))


def _mean(params, batch):
    total, count = _sums(params, batch)
    return total / count


def _everywhere(x):
    return replicator.all_reduce(x, "sum")


def _here(x):
    return x


def _program(name: str, make_tx, step_of, **program) -> Program:
    """Make a program of a step that is handed a loss over all examples, and a sum."""

    def make(wrap):
        optimizer = make_tx(wrap)

        def init(key):
            params = jax.tree.map(jnp.asarray, MLP_WEIGHTS)
            return {"params": params, "opt": optimizer.init(params)}

        return init, optimizer

    return Program(
        name=name,
        batch=_batch,
        settings=WHOLE,
        **pair(
            make,
            lambda tx: step_of(tx, replicator.global_loss(_local), _everywhere),
            lambda setting, tx: cut_by(())(
                step_of(optax.with_extra_args_support(tx), _mean, _here)
            ),
        ),
        **program,
    )


def _moved(state, updates, opt):
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def _searched(tx, loss_fn, total):
    """Search along a quasi-Newton direction."""

    def step(state, batch):
        def value_fn(params):
            return loss_fn(params, batch)

        params = state["params"]
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, opt = tx.update(
            grad, state["opt"], params, value=value, grad=grad, value_fn=value_fn
        )
        return _moved(state, updates, opt), {"loss": value}

    return step


def _lbfgs(wrap):
    return optax.lbfgs(
        memory_size=3, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=6)
    )


def _wrapped_backtracking(wrap):
    return wrap(
        optax.chain(
            optax.sgd(1.0),
            optax.scale_by_backtracking_linesearch(max_backtracking_steps=8),
        )
    )


def _sharpness_aware(tx, loss_fn, total):
    """Take the gradient where the loss of all examples rises most."""

    def step(state, batch):
        params = state["params"]
        value, up = jax.value_and_grad(loss_fn)(params, batch)
        rise = 0.05 / optax.tree.norm(up)
        there = jax.tree.map(lambda p, g: p + rise * g, params, up)
        updates, opt = tx.update(jax.grad(loss_fn)(there, batch), state["opt"], params)
        return _moved(state, updates, opt), {"loss": value}

    return step


def _natural(tx, loss_fn, total):
    """Solve with the Gauss-Newton matrix of all examples, by conjugate gradients."""

    def told(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
        return (hidden @ params["w2"]) * batch["mask"]

    def step(state, batch):
        params = state["params"]
        count = total(batch["mask"].sum())
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        _, forward = jax.linearize(lambda p: told(p, batch), params)
        back = jax.linear_transpose(forward, params)

        def matvec(v):
            (product,) = back(forward(v))
            return jax.tree.map(lambda g, v: total(g) / count + 0.1 * v, product, v)

        direction, _ = jax.scipy.sparse.linalg.cg(matvec, grads, maxiter=8, tol=0.0)
        updates, opt = tx.update(direction, state["opt"], params)
        return _moved(state, updates, opt), {"loss": value}

    return step


def _newton(tx, loss_fn, total):
    """Solve for the last layer with its exact Hessian over all examples."""

    def step(state, batch):
        params = state["params"]
        hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
        weighed = hidden * batch["mask"][:, None]
        gram = total(weighed.T @ hidden) + 0.1 * jnp.eye(8)
        head = jnp.linalg.solve(gram, total(weighed.T @ batch["y"]))
        params = params | {"w2": head}
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt = tx.update(grads, state["opt"], params)
        return _moved(state | {"params": params}, updates, opt), {"loss": value}

    return step


def _kronecker(invert):
    """Precondition by inverses of second moments of inputs, made by `invert`."""

    def of(tx, loss_fn, total):
        def step(state, batch):
            params = state["params"]
            value, grads = jax.value_and_grad(loss_fn)(params, batch)
            hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
            moments = [
                total(leaf.T @ (leaf * batch["mask"][:, None])) / 30
                + 0.1 * jnp.eye(leaf.shape[1])
                for leaf in (batch["x"], hidden)
            ]
            first, second = invert(jnp.linalg.inv, moments)
            grads = grads | {"w1": first @ grads["w1"], "w2": second @ grads["w2"]}
            updates, opt = tx.update(grads, state["opt"], params)
            return _moved(state, updates, opt), {"loss": value}

        return step

    return of


def _ridge(tx, loss_fn, total):
    """Differentiate through a ridge regression over all examples, implicitly."""

    def step(state, batch):
        params = state["params"]

        def outer(params):
            features = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
            weighed = features * batch["mask"][:, None]
            gram = lax.stop_gradient(total(weighed.T @ features)) + 0.5 * jnp.eye(8)
            right = lax.stop_gradient(total(weighed.T @ batch["y"]))
            solution = jax.scipy.sparse.linalg.cg(lambda v: gram @ v, right, tol=0.0)[0]
            return features @ solution

        apart = lax.stop_gradient(outer(params)) - batch["y"]
        count = total(batch["mask"].sum())
        _, back = jax.vjp(outer, params)
        (grads,) = back(2 * apart * batch["mask"] / count)
        grads = jax.tree.map(total, grads)
        updates, opt = tx.update(grads, state["opt"], params)
        loss = total((apart**2 * batch["mask"]).sum()) / count
        return _moved(state, updates, opt), {"loss": loss}

    return step


def _wrapped_adam(wrap):
    return wrap(optimizers.adam())


PROGRAMS = [
    _program("lbfgs-line-search", _lbfgs, _searched),
    _program("backtracking-in-the-wrap", _wrapped_backtracking, _searched),
    _program("sharpness-aware", _wrapped_adam, _sharpness_aware),
    # Eight turns of conjugate gradients spread rounding by the condition of the matrix.
    _program("gauss-newton-cg", _wrapped_adam, _natural, expect=Same(tolerance=1e-6)),
    _program("newton-head", _wrapped_adam, _newton),
    _program("ridge-cg", _wrapped_adam, _ridge),
]
_SHARED_OUT = _program(
    "kronecker-map-gather", _wrapped_adam, _kronecker(replicator.map_gather)
)
_ALONE = _program(
    "kronecker",
    _wrapped_adam,
    _kronecker(lambda fn, items: [fn(item) for item in items]),
)
PROGRAMS.append(
    Program(
        name=_SHARED_OUT.name,
        ours=_SHARED_OUT.ours,
        oracle=_ALONE.oracle,
        batch=_batch,
        settings=WHOLE,
    )
)
