"""Models whose gradients take unusual ways: solvers, second order, branches, rounding.

No examples meet here; see `tasks` for what a task is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.truth.tasks import (
    FEATURES,
    MLP_WEIGHTS,
    Task,
    sequences,
    vectors,
    weights,
    words,
)


def _mlp_at(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"][0]) @ params["w2"]


def _gradient_penalty(params, batch, world):
    def one(x, y):
        told, slope = jax.value_and_grad(lambda x: _mlp_at(params, x))(x)
        return (told - y) ** 2 + 0.3 * (jnp.sqrt(slope @ slope + 1e-3) - 1) ** 2

    return jax.vmap(one)(batch["x"], batch["y"]), {}


gradient_penalty = Task(
    name="gradient-penalty",
    params=MLP_WEIGHTS,
    losses=_gradient_penalty,
    batch=vectors,
)


def _residual(params, batch, world):
    """Solve u'' = y along the first axis: forward over forward, then reverse."""

    def one(x, y):
        def along(t):
            return _mlp_at(params, x.at[0].add(t))

        def slope(t):
            return jax.jvp(along, (t,), (jnp.ones_like(t),))[1]

        zero = jnp.zeros((), x.dtype)
        bend = jax.jvp(slope, (zero,), (jnp.ones_like(zero),))[1]
        return (bend - y) ** 2

    return jax.vmap(one)(batch["x"], batch["y"]), {}


second_order = Task(
    name="differential-equation", params=MLP_WEIGHTS, losses=_residual, batch=vectors
)


def _maml(params, batch, world):
    """Adapt to each example by one step of gradient descent, then judge it."""

    def one(x, y):
        def loss(params):
            return (_mlp_at(params, x) - y) ** 2

        inner = jax.grad(loss)(params)
        adapted = jax.tree.map(lambda p, g: p - 0.05 * g, params, inner)
        return (_mlp_at(adapted, x[::-1]) - y) ** 2

    return jax.vmap(one)(batch["x"], batch["y"]), {}


maml = Task(name="maml", params=MLP_WEIGHTS, losses=_maml, batch=vectors)


def _equilibrium(params, batch, world):
    """Find z = tanh(0.3 W z + U x) per example; differentiate implicitly."""

    def one(x, y):
        def rest(z):
            return z - jnp.tanh(0.3 * params["w"] @ z + x @ params["u"])

        def solve(fn, start):
            return lax.fori_loop(0, 60, lambda _, z: z - fn(z), start)

        def solve_tangent(matvec, b):
            return jnp.linalg.solve(jax.jacobian(matvec)(b), b)

        zeros = jnp.zeros(5, x.dtype)
        return (
            lax.custom_root(rest, zeros, solve, solve_tangent) @ params["o"] - y
        ) ** 2

    return jax.vmap(one)(batch["x"], batch["y"]), {}


equilibrium = Task(
    name="implicit-equilibrium",
    params=weights(6, w=(5, 5), u=(FEATURES, 5), o=(5,)),
    losses=_equilibrium,
    batch=vectors,
)


def _solved(params, batch, world):
    """Solve a linear system per example by conjugate gradients."""

    def one(x, y):
        def matvec(v):
            return v + params["a"] @ (params["a"].T @ v) * (1 + x[0] ** 2)

        found, _ = jax.scipy.sparse.linalg.cg(matvec, x @ params["u"], tol=1e-14)
        return (found.sum() - y) ** 2

    return jax.vmap(one)(batch["x"], batch["y"]), {}


solved = Task(
    name="implicit-cg",
    params=weights(7, a=(3, 3), u=(FEATURES, 3)),
    losses=_solved,
    batch=vectors,
)


@jax.custom_vjp
def _rounded(x):
    return jnp.round(x * 4) / 4


_rounded.defvjp(lambda x: (_rounded(x), None), lambda _, g: (g,))


def _quantised(params, batch, world):
    hidden = jnp.tanh(batch["x"] @ _rounded(params["w1"]) + params["b1"])
    return (hidden @ _rounded(params["w2"]) - batch["y"]) ** 2, {}


quantised = Task(
    name="straight-through", params=MLP_WEIGHTS, losses=_quantised, batch=vectors
)


def _stack(params, batch, world):
    def layer(x, w):
        return jnp.tanh(x @ w) + x, None

    deep, _ = lax.scan(jax.checkpoint(layer), batch["x"], params["layers"])
    return (deep @ params["out"] - batch["y"]) ** 2, {}


remat_stack = Task(
    name="remat-scan",
    params=weights(8, layers=(3, FEATURES, FEATURES), out=(FEATURES,)),
    losses=_stack,
    batch=vectors,
)


def _branches(params, batch, world):
    def one(x, y, label):
        arms = [lambda x, i=i: jnp.tanh(x @ params["w"][i]).sum() for i in range(3)]
        told = lax.switch(label, arms, x)
        return lax.cond(told > y, lambda d: d**2, lambda d: jnp.abs(d) * 2, told - y)

    return jax.vmap(one)(batch["x"], batch["y"], batch["label"]), {}


branches = Task(
    name="switch-cond",
    params=weights(9, w=(3, FEATURES, 2)),
    losses=_branches,
    batch=vectors,
)


def _spectrum(params, batch, world):
    weight = params["real"] + 1j * params["imaginary"]
    told = jnp.fft.irfft(jnp.fft.rfft(batch["x"], axis=1) * weight, axis=1)
    return ((told.sum(-1) - batch["y"][:, None]) ** 2).mean(-1), {}


def _sequence_mean(rng):
    batch = sequences(rng)
    return {"x": batch["x"], "y": batch["y"][:, 0]}


spectrum = Task(
    name="fourier",
    params=weights(10, real=(1, 3, 3), imaginary=(1, 3, 3)),
    losses=_spectrum,
    batch=_sequence_mean,
)


def _complex(params, batch, world):
    told = jnp.abs(batch["x"].astype(params["w"].dtype) @ params["w"]).sum(-1)
    return (told - batch["y"]) ** 2, {}


complex_weights = Task(
    name="complex",
    params={
        "w": weights(11, w=(FEATURES, 3))["w"] + 1j * weights(12, w=(FEATURES, 3))["w"]
    },
    losses=_complex,
    batch=vectors,
)


def _ctc(params, batch, world):
    logits = jnp.tanh(batch["x"] @ params["w"]) @ params["o"]
    padding = jnp.zeros(logits.shape[:2], logits.dtype)
    labels = 1 + batch["label"]
    return optax.ctc_loss(logits, padding, labels, jnp.zeros(labels.shape)), {}


def _spoken(rng):
    label = rng.integers(0, 3, (len(sequences(rng)["x"]), 2)).astype(np.int32)
    return {"x": sequences(rng)["x"], "label": label}


ctc = Task(
    name="ctc", params=weights(13, w=(3, 6), o=(6, 4)), losses=_ctc, batch=_spoken
)


def _bag(params, batch, world):
    """Gather rows of a table, most of which a batch does not touch."""
    rows = params["table"][batch["word"]]
    told = jnp.max(rows, axis=1) @ params["out"]
    return cross_last(told, batch["word"][:, 0]), {}


def cross_last(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels % 3)


embedding_bag = Task(
    name="embedding-bag",
    params=weights(14, table=(50, 6), out=(6, 3)),
    losses=_bag,
    batch=words,
)
