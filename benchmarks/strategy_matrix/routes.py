"""Steps of patterns side by side: where arrays come from, and where results go.

Each pattern has parameters, state and metrics of its own, which bear its name: what is
wrong names it. A name is `pattern.size.mover`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
"""Operations that move the rows of a result, by name."""


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
"""Bodies around a pattern, by name; the mover is in loops, and behind the others."""

ROUTES = (
    *("batch to loss", "batch to state", "activation to loss", "activation to state"),
    *("parameter to loss", "parameter to gradient", "gradient", "parameter", "state"),
)
"""Source of the array and destination of the result; one name means both."""


class _Part(NamedTuple):
    """One pattern of a size, with what stands around it and behind it."""

    run: Callable[[Array, Array], Array]
    size: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """The step of patterns side by side along a route.

    Attributes:
      patterns: By name.
      route: One of `ROUTES`.
      body: One of `BODIES`.
      movers: Some of `MOVERS`.
      sizes: Some of `SIZES`.
    """

    patterns: Mapping[str, Pattern]
    route: str
    body: str = "plain"
    movers: Sequence[str] = tuple(MOVERS)
    sizes: Sequence[str] = ("even", "odd", "wide")

    def parts(self, wrap: Callable[..., Any]) -> tuple[InitFn, StepFn]:
        """Return `init_fn` and `step_fn`, as a case does."""
        tx = wrap()

        def init_fn(key: Array) -> PyTree:
            del key
            state = self._first()
            return {**state, "opt": tx.init(state["params"])}

        def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            params, after = state["params"], dict(state)
            take = jax.value_and_grad(self._losses, has_aux=True)
            (_, metrics), grads = take(params, state, batch)
            if self._sink == "gradient":
                given = grads if self._source == "gradient" else params
                grads |= self._results(given, batch)
            if self._sink == "state":
                after |= self._kept(state, batch)
            updates, after["opt"] = tx.update(grads, state["opt"], params)
            params = {name: params[name] + updates[name] for name in params}
            if self._sink == "parameter":
                params |= self._results(params, batch)
            return {**after, "params": params}, metrics

        return init_fn, step_fn

    @property
    def _source(self) -> str:
        return self.route.split()[0]

    @property
    def _sink(self) -> str:
        return self.route.split()[-1]

    @functools.cached_property
    def _every(self) -> dict[str, _Part]:
        every = {
            f"{name}.{size}.{mover}": _Part(
                functools.partial(BODIES[self.body], pattern, MOVERS[mover]), size
            )
            for (name, pattern), mover, size in itertools.product(
                self.patterns.items(), self.movers, self.sizes
            )
        }
        if self._sink not in ("gradient", "parameter"):
            return every
        return {name: part for name, part in every.items() if self._returns(part)}

    def _result(self, part: _Part) -> jax.ShapeDtypeStruct:
        rows, columns, others = SIZES[part.size]
        if self._source in ("batch", "activation"):
            rows = ROWS
        return jax.eval_shape(part.run, _shape(rows, columns), _shape(ROWS, others))

    def _returns(self, part: _Part) -> bool:
        """Return whether a result may take the place of the array."""
        rows, columns, _ = SIZES[part.size]
        return self._result(part) == _shape(rows, columns)

    def _first(self) -> PyTree:
        """Return the first state, less the optimizer's."""
        arrays = {
            name: _normal(number, *self._array_shape(part))
            for number, (name, part) in enumerate(self._every.items())
        }
        params = {"base": jnp.ones((INPUTS, INPUTS))}
        if self._source == "state":
            state = {"kept": arrays, "params": params}
        elif self.route == "batch to state":  # nothing is learned
            state = {"params": params}
        else:
            state = {"params": params | arrays}
        if self._sink == "state":
            state["out"] = {
                name: jnp.zeros_like(self._result(part))
                for name, part in self._every.items()
                if self._source != "state" or not self._returns(part)
            }
        return state

    def _array_shape(self, part: _Part) -> tuple[int, int]:
        rows, columns, _ = SIZES[part.size]
        if self._source == "activation":
            return INPUTS, columns
        if self._source == "batch":
            shape = self._result(part).shape
            return (shape[-1] if shape else 1), INPUTS
        return rows, columns

    def _losses(
        self, params: PyTree, state: PyTree, batch: PyTree
    ) -> tuple[Array, PyTree]:
        base = jnp.square(batch["inputs"] @ params["base"] - 0.5).mean()
        learned = self._sink != "state" and self.route != "parameter to gradient"
        each = {
            name: self._loss(part, params[name], batch)
            for name, part in self._every.items()
            if learned
        }
        return base + sum(each.values()), {**each, "loss": base}

    def _loss(self, part: _Part, param: Array, batch: PyTree) -> Array:
        x, u = batch[part.size]["x"], batch[part.size]["u"]
        match self._source:
            case "batch":
                v = part.run(x, u).astype(jnp.float32)
                v = jnp.tanh(v[..., None] if v.ndim == 0 else v) @ param
            case "activation":
                v = part.run(jnp.tanh(batch["inputs"] @ param), u)
            case "parameter" if self._sink == "loss":
                v = part.run(param, u)
            case _:
                v = x @ param.T
        v = v.astype(jnp.float32)
        return (jnp.square(v) / 2 + v * _wave(v.shape)).mean()

    def _results(self, arrays: PyTree, batch: PyTree) -> PyTree:
        return {
            name: part.run(arrays[name], batch[part.size]["u"])
            for name, part in self._every.items()
        }

    def _kept(self, state: PyTree, batch: PyTree) -> PyTree:
        """Return the new state of what no optimizer moves."""
        match self._source:
            case "batch":
                arrays = {n: batch[part.size]["x"] for n, part in self._every.items()}
            case "activation":
                inputs, params = batch["inputs"], state["params"]
                arrays = {n: jnp.tanh(inputs @ params[n]) for n in self._every}
            case _:
                arrays = state["kept"]
        found, out = self._results(arrays, batch), state["out"]
        after = {"out": {name: found[name] for name in out}}
        if "kept" in state:
            kept = state["kept"].items()
            after["kept"] = {n: a if n in out else found[n] for n, a in kept}
        return after


def _normal(seed: int, rows: int, columns: int) -> Array:
    drawn = np.random.default_rng(seed).normal(size=(rows, columns))
    return jnp.asarray(drawn, jnp.float32)


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
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
