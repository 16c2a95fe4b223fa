"""Steps of patterns side by side: where arrays come from, and where results go.

Each pattern has parameters, state and metrics of its own, which bear its name: what is
wrong names it. A name is `pattern.size.mover`.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.strategy_matrix.writes import Pattern
from replicator.base.types import InitFn, PyTree, StepFn

ROWS, INPUTS = 32, 8
SIZES: Mapping[str, tuple[int, int, int]] = {
    "even": (32, 8, 8),
    "odd": (23, 5, 5),
    "wide": (12, 48, 48),
    "kernel": (18, 16, 32),
    "kernel-odd": (18, 6, 32),
}
"""Rows and columns of an array, and columns of the other one, whose rows are `ROWS`."""

Mover = Callable[[Array], Array]

MOVERS: Mapping[str, Mover] = {
    "still": lambda v: v,
    "roll": lambda v: jnp.roll(v, 3, 0),
    "flip": lambda v: jnp.flip(v, 0),
    "cumsum": lambda v: jnp.cumsum(v, 0),
    "sort": lambda v: jnp.sort(v, 0),
    "concatenate": lambda v: jnp.concatenate([v[1:], v[:1]]),
    "update": lambda v: lax.dynamic_update_slice(
        v, 2 * v[:1], (jnp.int32(1),) + (jnp.int32(0),) * (v.ndim - 1)
    ),
}
"""What moves the rows of a result, by name."""


def _scanned(pattern: Pattern, mover: Mover, x: Array, u: Array) -> Array:
    shape = jax.eval_shape(pattern, x, u)
    returns = shape.shape == x.shape and shape.dtype == x.dtype

    def turn(carry: Array, _: None) -> tuple[Array, Array]:
        v = mover(pattern(carry, u))
        return (v if returns else 0.9 * carry), v

    last, every = lax.scan(turn, x, None, length=2)
    return last if returns else every[0] + every[1]


def _chosen(pattern: Pattern, mover: Mover, x: Array, u: Array) -> Array:
    other = lambda x, u: pattern(2 * x, u)  # noqa: E731
    return mover(lax.cond(u[0, 0] > -9.0, pattern, other, x, u))


def _mapped(pattern: Pattern, mover: Mover, x: Array, u: Array) -> Array:
    run = jax.vmap(lambda x: mover(pattern(x, u)))
    both = run(jnp.stack([x, 0.5 * x]))
    return both[0] + both[1]


BODIES: Mapping[str, Callable[[Pattern, Mover, Array, Array], Array]] = {
    "plain": lambda pattern, mover, x, u: mover(pattern(x, u)),
    "scan": _scanned,
    "cond": _chosen,
    "remat": lambda pattern, mover, x, u: mover(jax.checkpoint(pattern)(x, u)),
    "vmap": _mapped,
}
"""What a pattern stands in, by name; the mover is in loops, and behind the others."""

ROUTES = (
    *("batch to loss", "batch to state", "activation to loss", "activation to state"),
    *("parameter to loss", "parameter to gradient", "gradient", "parameter", "state"),
)


def parts_of(
    patterns: Mapping[str, Pattern],
    route: str,
    *,
    body: str = "plain",
    movers: Sequence[str] = tuple(MOVERS),
    sizes: Sequence[str] = ("even", "odd", "wide"),
) -> Callable[..., tuple[InitFn, StepFn]]:
    """Return the `parts` of a case: all patterns along one route."""

    def moved(pattern: Pattern, mover: str, x: Array, u: Array) -> Array:
        return BODIES[body](pattern, MOVERS[mover], x, u)

    source, _, sink = route.partition(" to ")
    sink = sink or source
    every = {
        f"{name}.{size}.{mover}": (functools.partial(moved, pattern, mover), size)
        for (name, pattern), mover, size in itertools.product(
            patterns.items(), movers, sizes
        )
    }
    of_batch = source in ("batch", "activation")

    def result(name: str) -> jax.ShapeDtypeStruct:
        run, size = every[name]
        rows, columns, others = SIZES[size]
        x, u = (ROWS if of_batch else rows, columns), (ROWS, others)
        return jax.eval_shape(run, *map(_shape, (x, u)))

    def returns(name: str) -> bool:
        shape = result(name)
        return shape == _shape(SIZES[every[name][1]][:2])

    if sink in ("gradient", "parameter"):
        every = {name: each for name, each in every.items() if returns(name)}

    def first(number: int, name: str) -> tuple[Array, ...]:
        size = SIZES[every[name][1]][:2]
        if source == "activation":
            size = (INPUTS, size[1])
        if source == "batch":
            shape = result(name).shape
            size = (shape[-1] if shape else 1, INPUTS)
        drawn = np.random.default_rng(number).normal(size=size).astype(np.float32)
        return jnp.asarray(drawn / np.sqrt(size[0]) if source == "activation" else drawn)

    def array(name: str, params: PyTree, state: PyTree, batch: PyTree) -> Array:
        size = every[name][1]
        if source == "batch":
            return batch[size]["x"]
        if source == "activation":
            return jnp.tanh(batch["inputs"] @ params[name])
        return (state["kept"] if source == "state" else params)[name]

    def loss_of(name: str, params: PyTree, state: PyTree, batch: PyTree) -> Array:
        run, size = every[name]
        u = batch[size]["u"]
        if sink in ("gradient", "parameter"):
            # Rows of the array, and of what the batch holds as many as fit.
            return jnp.square(u[:, : SIZES[size][1]] @ params[name].T - 0.5).mean()
        v = run(array(name, params, state, batch), u).astype(jnp.float32)
        if source == "batch":
            v = jnp.tanh(v[..., None] if v.ndim == 0 else v) @ params[name]
        return (jnp.square(v) / 2 + v * _wave(v.shape)).mean()

    trains = sink != "state" and route != "parameter to gradient"

    def losses(params: PyTree, state: PyTree, batch: PyTree) -> tuple[Array, PyTree]:
        each = {name: loss_of(name, params, state, batch) for name in every if trains}
        base = jnp.square(batch["inputs"] @ params["base"] - 0.5).mean()
        return base + sum(each.values()), {**each, "loss": base}

    def parts(wrap: Callable[..., Any]) -> tuple[InitFn, StepFn]:
        tx = wrap()

        def init_fn(key: Array) -> PyTree:
            del key
            drawn = {name: first(number, name) for number, name in enumerate(every)}
            base = {"base": jnp.ones((INPUTS, INPUTS))}
            if source == "state":
                params, state = base, {"kept": drawn}
            else:
                params, state = base | drawn, {}
            if sink == "state":
                state["out"] = {
                    name: jnp.zeros(shape.shape, shape.dtype)
                    for name in every
                    if (shape := result(name)) is not None
                    and not (source == "state" and returns(name))
                }
            return {**state, "params": params, "opt": tx.init(params)}

        def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            params, after = state["params"], dict(state)
            take = jax.value_and_grad(losses, has_aux=True)
            (_, metrics), grads = take(params, state, batch)
            u = {size: batch[size]["u"] for size in SIZES}
            if sink == "gradient":
                given = grads if source == sink else params
                grads |= {n: run(given[n], u[size]) for n, (run, size) in every.items()}
            if sink == "state":
                found = {
                    name: run(array(name, params, state, batch), u[size])
                    for name, (run, size) in every.items()
                }
                for kind in state.keys() & {"kept", "out"}:
                    after[kind] = {
                        name: found[name] if kind == "out" or returns(name) else leaf
                        for name, leaf in state[kind].items()
                    }
            updates, after["opt"] = tx.update(grads, state["opt"], params)
            params = {name: params[name] + updates[name] for name in params}
            if sink == "parameter":
                params |= {
                    n: run(params[n], u[size]) for n, (run, size) in every.items()
                }
            return {**after, "params": params}, metrics

        return init_fn, step_fn

    return parts


def _shape(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _wave(shape: tuple[int, ...]) -> Array:
    numbers = np.arange(np.prod(shape, dtype=int), dtype=np.float32)
    return jnp.asarray(np.cos(numbers).reshape(shape))


def batch() -> PyTree:
    """Draw a global batch: inputs, and two arrays of each size's columns."""
    rng = np.random.default_rng(4)

    def rows(columns: int) -> np.ndarray:
        return rng.normal(size=(ROWS, columns)).astype(np.float32)

    pairs = {name: {"x": rows(n), "u": rows(m)} for name, (_, n, m) in SIZES.items()}
    return {"inputs": rows(INPUTS), **pairs}
