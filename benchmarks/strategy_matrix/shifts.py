"""Patterns that read and shift arrays, by group and name; see `writes.py`."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

from benchmarks.strategy_matrix.writes import AGAIN, PLACES, Pattern, at, drawn


def _padded(x: Array, *config: tuple[int, int, int]) -> Array:
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _windows(x: Array, u: Array) -> Array:
    """Gather three rows from each of five places, the last of which is clamped."""
    del u
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )
    starts = at(0, 2, 1, 5, len(x) - 1)[:, None]
    return lax.gather(x, starts, numbers, (3, x.shape[1]), mode="clip")


def _pooled(x: Array, u: Array) -> Array:
    """Take the largest of windows; its gradient selects and scatters."""
    del u
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "SAME")


def _smoothed(x: Array) -> Array:
    return lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME")


def _least(x: Array) -> Array:
    return lax.reduce_window(x, jnp.inf, lax.min, (3, 1), (1, 1), "SAME")


def _largest(x: Array) -> Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")


def _returns(x: Array, u: Array) -> Array:
    """Discount rows that follow, in a loop backwards."""

    def turn(after: Array, row: Array) -> tuple[Array, Array]:
        after = row + 0.9 * after
        return after, after

    return lax.scan(turn, u[0], x, reverse=True)[1]


def _linear(x: Array, u: Array) -> Array:
    """Add up with decay in the order of a tree."""

    def join(one: tuple[Array, Array], other: tuple[Array, Array]):
        return one[0] * other[0], other[0] * one[1] + other[1]

    del u
    return lax.associative_scan(join, (jnp.full_like(x, 0.9), x))[1]


def _along(x: Array, axis: int) -> Array:
    places = jnp.argsort(lax.stop_gradient(x), axis)
    return jnp.take_along_axis(x, places, axis)


def _frames(x: Array, u: Array) -> Array:
    del u
    return jnp.stack([jnp.roll(x, turn, 0) for turn in range(3)], 1)


SHIFTS: Mapping[str, Mapping[str, Pattern]] = {
    "pads": {
        "pad-shift": lambda x, u: _padded(x, (1, -1, 0), (0, 0, 0)),
        "pad-shift-columns": lambda x, u: _padded(x, (0, 0, 0), (-1, 1, 0)),
        "pad-crop": lambda x, u: _padded(x, (-2, -1, 0), (0, 0, 0)),
        "pad-grow": lambda x, u: _padded(x, (1, 2, 0), (0, 0, 0)),
        "pad-zeros": lambda x, u: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
        "pad-wrap": lambda x, u: jnp.pad(x, ((2, 1), (0, 0)), mode="wrap"),
    },
    # Compilers abort on these: they stand alone.
    "pads-inside": {
        "inside": lambda x, u: _padded(x, (0, 0, 1), (0, 0, 0)),
        "inside-columns": lambda x, u: _padded(x, (0, 0, 0), (0, 1, 2)),
        "inside-crop": lambda x, u: _padded(x, (0, 0, 1), (0, 0, 0))[: len(x)],
    },
    "pads-inside-crop": {
        "inside-both": lambda x, u: _padded(x, (-1, -2, 2), (0, 0, 1)),
    },
    "reads": {
        "past-end": lambda x, u: x[at(0, len(x) + 3, 2)],
        "past-end-fill": lambda x, u: x.at[at(0, len(x) + 3, 2)].get(
            mode="fill", fill_value=0
        ),
        "past-end-clip": lambda x, u: x.at[at(len(x), 2, -len(x) - 1)].get(mode="clip"),
        "take-wrap": lambda x, u: jnp.take(x, at(1, len(x) + 1), 0, mode="wrap"),
        "embedding": lambda x, u: x[drawn(u, len(x), None)],
        "embedding-past": lambda x, u: x[drawn(u, len(x), None) + len(x) - 3],
        "windows": _windows,
        "along-rows": lambda x, u: _along(x, 0),
        "along-columns": lambda x, u: _along(x, 1),
        "past-slice": lambda x, u: lax.dynamic_slice(
            x, (len(x) - 2, 0), (4, x.shape[1])
        ),
        "index-past": lambda x, u: lax.dynamic_index_in_dim(x, len(x) + 2, 0),
        "slice-drawn": lambda x, u: lax.dynamic_slice_in_dim(x, drawn(u, 8, 1)[0], 5),
        "strided": lambda x, u: x[1::3, ::2],
    },
    "turns": {
        "roll": lambda x, u: jnp.roll(x, 3, 0) + jnp.roll(x, -1, 1),
        "roll-drawn": lambda x, u: jnp.roll(x, drawn(u, 5, 1)[0], 0),
        "flip": lambda x, u: jnp.flip(x, 0) - x,
        "frames": _frames,
        "sort": lambda x, u: jnp.sort(x, 0),
        "argsort": lambda x, u: jnp.argsort(x, 0),
        "top-k": lambda x, u: lax.top_k(x.T, 3)[0],
        "by-order": lambda x, u: x[jnp.argsort(x[:, 1])],
        "transposed": lambda x, u: jnp.roll(x.T, 1, 1).at[0].set(1.0).T,
    },
    "sums-along": {
        "cumsum": lambda x, u: jnp.cumsum(x, 0),
        "cumsum-back": lambda x, u: lax.cumsum(x, 0, reverse=True),
        "cummax": lambda x, u: lax.cummax(x, 0),
        "cumprod": lambda x, u: jnp.cumprod(0.9 + 0.1 * x, 0),
        "returns": _returns,
        "linear": _linear,
        "pooled": _pooled,
        "averaged": lambda x, u: _smoothed(x),
        "diff": lambda x, u: jnp.diff(x, axis=0),
    },
    # Of one array, with what fills its edges not the same twice.
    "fills": {
        "sum-and-max": lambda x, u: jnp.cumsum(x, 0) + lax.cummax(x, 0),
        "least-and-most": lambda x, u: _largest(x) - _least(x),
        "two-pools": lambda x, u: _smoothed(x) * _largest(x),
        "two-pads": lambda x, u: (
            jnp.pad(x, ((1, 0), (0, 0)), constant_values=1.0)
            + jnp.pad(x, ((1, 0), (0, 0)))
        ),
        "two-shifts": lambda x, u: (
            lax.pad(x, 1.0, ((1, -1, 0), (0, 0, 0))) - _padded(x, (1, -1, 0), (0, 0, 0))
        ),
    },
    "joins": {
        "shifted": lambda x, u: jnp.concatenate([x[1:], u[:1]]),
        "append": lambda x, u: jnp.append(x, u[:2], axis=0),
        "insert": lambda x, u: jnp.insert(x, 2, u[0], axis=0),
        "insert-places": lambda x, u: jnp.insert(x, at(1, 4), u[:2], axis=0),
        "delete": lambda x, u: jnp.delete(x, 1, axis=0)[:-1],
        "repeat": lambda x, u: jnp.repeat(x, 2, 0)[1:],
        "tile": lambda x, u: jnp.tile(x, (2, 1))[3:],
        "triangle": lambda x, u: jnp.tril(x @ x.T, -1) @ x,
        "split": lambda x, u: jnp.concatenate(jnp.split(x, [3, 5])[::-1]),
        "again": lambda x, u: x[at(*PLACES)][at(*AGAIN) % 5],
    },
}
"""By group and name."""
