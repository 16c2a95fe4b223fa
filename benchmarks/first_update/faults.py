"""Steps that XLA's partitioner makes wrong, without a guard: writes, shifts, groups.

A pattern is a function of an array, [rows, columns], and of rows of the batch. It is
put where the array of a route comes from, and its result where that route goes.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from benchmarks.strategy_matrix.cases import Case, Wrap
from replicator.base.types import InitFn, PyTree, StepFn

Pattern = Callable[[Array, Array], Array]

ROWS, INPUTS, COLUMNS = 32, 8, 64


def _next_values(x: Array, u: Array) -> Array:
    """Return each row's successor, as generalised advantages read the next value."""
    return x.at[:-1].set(x[1:]).at[-1].set(u[0])


def _stencil(x: Array, u: Array) -> Array:
    inner = x.at[1:-1].add(0.5 * x[:-2] + 0.25 * x[2:])
    return inner.at[0].set(u[0]).at[-1].set(u[1])


def _update(x: Array, u: Array) -> Array:
    """Move rows by an update of a slice that is clamped."""
    start = (jnp.int32(len(x) - 1), jnp.int32(0))
    return lax.dynamic_update_slice(x.at[0].set(u[0]).at[1].set(u[1]), 2 * x[:3], start)


def _shifted(x: Array, u: Array) -> Array:
    del u
    return lax.pad(x, jnp.zeros((), x.dtype), ((1, -1, 0), (0, 0, 0)))


def _own(x: Array, u: Array) -> Array:
    del u
    places = jnp.array((0, 2, 4, 6, 1, 3, 5, 7, 2), jnp.int32)
    return x.at[places].add(x[: len(places)])


def _twice(x: Array, u: Array) -> Array:
    return x.at[0].set(u[0]).at[1].set(u[1])


def _clipped(x: Array, u: Array) -> Array:
    """Clip the gradient of each example of a convolution, then take their mean."""

    def loss(kernel: Array, image: Array) -> Array:
        y = lax.conv_general_dilated(
            image[None],
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.square(jnp.tanh(y)).sum()

    kernel = x[:18].reshape(3, 3, 2, -1)
    each = jax.vmap(jax.grad(loss), (None, 0))(kernel, u[:, :32].reshape(-1, 4, 4, 2))
    norm = jnp.sqrt(jnp.square(each).sum((1, 2, 3, 4), keepdims=True))
    mean = (each * jnp.minimum(1.0, 2.0 / norm)).mean(0)
    return x.at[:18].set(mean.reshape(18, -1))


PATTERNS: Mapping[str, Pattern] = {
    "next-values": _next_values,
    "stencil": _stencil,
    "twice-roll": lambda x, u: jnp.roll(_twice(x, u), 16, 0),
    "twice-flip": lambda x, u: jnp.flip(_twice(x, u), 0),
    "twice-cumsum": lambda x, u: jnp.cumsum(_twice(x, u), 0),
    "twice-sort": lambda x, u: jnp.sort(_twice(x, u), 0),
    "twice-joined": lambda x, u: jnp.concatenate([_twice(x, u)[1:], _twice(x, u)[:1]]),
    "adds-roll": lambda x, u: jnp.roll(x.at[2].add(u[0]).at[3].add(u[1]), 3, 0),
    "largest-roll": lambda x, u: jnp.roll(x.at[1].min(u[0]).at[2].max(u[1]), 3, 0),
    "update": _update,
    "shifted": _shifted,
    "own": _own,
    "clipped": _clipped,
}
"""By name."""

ROUTES = (
    *("batch to loss", "batch to state", "activation to loss", "activation to state"),
    *("parameter to loss", "gradient", "state"),
)


def fault(pattern: str, route: str, rows: int = ROWS) -> Case:
    """Return the case of one pattern along one route, with an array of so many rows."""
    run = PATTERNS[pattern]
    source, _, sink = route.partition(" to ")
    sink = sink or source
    from_batch = source in ("batch", "activation")
    shape = (ROWS if from_batch else rows, COLUMNS)

    def array(params: PyTree, state: PyTree, batch: PyTree) -> Array:
        if source == "batch":
            return batch["x"]
        if source == "activation":
            return jnp.tanh(batch["inputs"] @ params["in"])
        return state["kept"] if source == "state" else params["w"]

    def loss_fn(params: PyTree, state: PyTree, batch: PyTree) -> Array:
        base = jnp.square(jnp.tanh(batch["inputs"] @ params["in"]) @ params["out"])
        if sink != "loss":
            return base.mean() + jnp.square(params["w"] - 0.5).mean()
        v = run(array(params, state, batch), batch["u"]) @ params["out"]
        wave = np.cos(np.arange(v.size, dtype=np.float32)).reshape(v.shape)
        return base.mean() + (jnp.square(v) / 2 + v * wave).mean()

    def parts(wrap: Wrap) -> tuple[InitFn, StepFn]:
        tx = wrap()

        def init_fn(key: Array) -> PyTree:
            keys = jax.random.split(key, 3)
            params = {
                "in": jax.random.normal(keys[0], (INPUTS, COLUMNS)),
                "out": jax.random.normal(keys[1], (COLUMNS, INPUTS)) / 8,
                "w": jax.random.normal(keys[2], (rows, COLUMNS)),
            }
            kept = jax.random.normal(keys[2], shape)
            return {"params": params, "opt": tx.init(params), "kept": kept}

        def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            params, kept = state["params"], state["kept"]
            loss, grads = jax.value_and_grad(loss_fn)(params, state, batch)
            if sink == "gradient":
                grads["w"] = run(grads["w"], batch["u"])
            if sink == "state":
                kept = run(array(params, state, batch), batch["u"])
            updates, opt = tx.update(grads, state["opt"], params)
            params = optax.apply_updates(params, updates)
            return {"params": params, "opt": opt, "kept": kept}, {"loss": loss}

        return init_fn, step_fn

    return Case(
        name=f"{pattern}/{route}/{rows}", parts=parts, batch=_batch(), tensor={}
    )


def _batch() -> PyTree:
    rng = np.random.default_rng(0)
    widths = {"inputs": INPUTS, "x": COLUMNS, "u": COLUMNS}
    return {
        name: rng.normal(size=(ROWS, width)).astype(np.float32)
        for name, width in widths.items()
    }
