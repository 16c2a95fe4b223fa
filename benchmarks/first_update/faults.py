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

ROWS, INPUTS = 32, 8


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

    kernel = x.reshape(3, 3, 2, -1)
    each = jax.vmap(jax.grad(loss), (None, 0))(kernel, u.reshape(-1, 4, 4, 2))
    norm = jnp.sqrt(jnp.square(each).sum((1, 2, 3, 4), keepdims=True))
    return (each * jnp.minimum(1.0, 2.0 / norm)).mean(0).reshape(18, -1)


PATTERNS: Mapping[str, Pattern] = {
    "next-values": _next_values,
    "stencil": _stencil,
    "twice-roll": lambda x, u: jnp.roll(_twice(x, u), 3, 0),
    "next-roll": lambda x, u: jnp.roll(_next_values(x, u), 3, 0),
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
    *("batch to loss", "activation to loss", "activation to state"),
    *("parameter to loss", "gradient", "state"),
)
"""Source of an array, and destination of the result."""

_SIZES = {"even": (32, 8), "odd": (23, 5), "kernel": (18, 16)}


def fault(pattern: str, route: str) -> Case:
    """Return the case of one pattern along one route, on arrays that divide or not."""
    run = PATTERNS[pattern]
    source, _, sink = route.partition(" to ")
    sink = sink or source
    sizes = ("kernel",) if pattern == "clipped" else ("even", "odd")

    def array(size: str, params: PyTree, kept: PyTree, batch: PyTree) -> Array:
        columns = _SIZES[size][1]
        if source == "batch":
            return batch["x"][:, :columns]
        if source == "activation":
            return jnp.tanh(batch["inputs"] @ params[f"in-{size}"])
        return kept[size] if source == "state" else params[f"w-{size}"]

    def loss_fn(params: PyTree, kept: PyTree, batch: PyTree) -> Array:
        total = jnp.square(jnp.tanh(batch["inputs"] @ params["base"]) - 0.5).mean()
        for size in sizes:
            w, u = params[f"w-{size}"], batch["u"]
            if sink != "loss":
                total += jnp.square(u[:, : w.shape[1]] @ w.T - 0.5).mean()
                continue
            v = run(array(size, params, kept, batch), u[:, : _width(pattern, size)])
            v = jnp.tanh(v) @ w.T if source == "batch" else v
            wave = np.cos(np.arange(v.size, dtype=np.float32)).reshape(v.shape)
            total += (jnp.square(v) / 2 + v * wave).mean()
        return total

    def parts(wrap: Wrap) -> tuple[InitFn, StepFn]:
        tx = wrap()

        def init_fn(key: Array) -> PyTree:
            params = {"base": jnp.ones((INPUTS, INPUTS))}
            kept = {}
            for number, size in enumerate(sizes):
                drawn = jax.random.split(jax.random.fold_in(key, number), 3)
                rows, columns = _SIZES[size]
                params[f"w-{size}"] = jax.random.normal(drawn[0], (rows, columns))
                params[f"in-{size}"] = jax.random.normal(drawn[1], (INPUTS, columns))
                rows = ROWS if source == "activation" else rows
                kept[size] = jax.random.normal(drawn[2], (rows, columns))
            return {"params": params, "opt": tx.init(params), "kept": kept}

        def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            params, kept = state["params"], state["kept"]
            loss, grads = jax.value_and_grad(loss_fn)(params, kept, batch)
            for size in sizes:
                u = batch["u"][:, : _width(pattern, size)]
                if sink == "gradient":
                    grads[f"w-{size}"] = run(grads[f"w-{size}"], u)
                if sink == "state":
                    kept = kept | {size: run(array(size, params, kept, batch), u)}
            updates, opt = tx.update(grads, state["opt"], params)
            params = optax.apply_updates(params, updates)
            return {"params": params, "opt": opt, "kept": kept}, {"loss": loss}

        return init_fn, step_fn

    return Case(name=f"{pattern}/{route}", parts=parts, batch=_batch(), tensor={})


def is_possible(pattern: str, route: str) -> bool:
    """Return whether a pattern makes sense along a route."""
    return pattern != "clipped" or route in ("parameter to loss", "state")


def _width(pattern: str, size: str) -> int:
    # What the convolution takes from the batch are images.
    return 32 if pattern == "clipped" else _SIZES[size][1]


def _batch() -> PyTree:
    rng = np.random.default_rng(0)
    widths = {"inputs": INPUTS, "x": 8, "u": 32}
    return {
        name: rng.normal(size=(ROWS, width)).astype(np.float32)
        for name, width in widths.items()
    }
