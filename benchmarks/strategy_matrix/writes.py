"""Patterns of writes: what a step does to an array in place, by group and name.

A pattern is a function of an array, [rows, columns], and of another one of as many
columns, whose rows come from the batch. It is right for any sizes of at least eight
rows and five columns. Where an index is named twice the values are added, or equal:
else their order would be the compiler's.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

Pattern = Callable[[Array, Array], Array]

PLACES = (6, 1, 4, 0, 5)
AGAIN = (1, 4, 1, 0, 1)
NINE = (0, 2, 4, 6, 1, 3, 5, 7, 2)


def at(*places: int) -> Array:
    """Return places as an index array."""
    return jnp.array(places, jnp.int32)


def drawn(u: Array, below: int, count: int | None = 5) -> Array:
    """Draw places from the batch, of all its rows if `count` is None."""
    return (jnp.abs(u[:count, 0]) * 7.0).astype(jnp.int32) % below


def _next_values(x: Array, u: Array) -> Array:
    """Return each row's successor, as generalised advantages read the next value."""
    return x.at[:-1].set(x[1:]).at[-1].set(u[0])


def _frame_stack(x: Array, u: Array) -> Array:
    return x.at[:, :-1].set(x[:, 1:]).at[:, -1].set(u[0, 0])


def _stencil(x: Array, u: Array) -> Array:
    inner = x.at[1:-1].add(0.5 * x[:-2] + 0.25 * x[2:])
    return inner.at[0].set(u[0]).at[-1].set(u[1])


def _columns(x: Array, u: Array) -> Array:
    del u
    return x.at[:, 1].set(0.5).at[:, 0].add(x[:, 2])


def _applied(x: Array, u: Array) -> Array:
    """Apply a function to rows; JAX does not differentiate it."""
    del u
    return 0.1 * x + lax.stop_gradient(x).at[at(1, 5)].apply(jnp.tanh)


def _diagonal(x: Array, u: Array) -> Array:
    places = jnp.arange(min(x.shape))
    return x.at[places, places].add(u[0, 0]).at[places, 0].multiply(0.5)


def _rows_in_turn(x: Array, u: Array) -> Array:
    return lax.fori_loop(0, 4, lambda i, x: x.at[i].set(u[i] + x[i + 1]), x)


def _until(x: Array, u: Array) -> Array:
    """Write rows until there is no more; a loop of unknown length."""
    last = 3 + (u[0, 0] > 100.0)

    def turn(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        i, x = carry
        return i + 1, x.at[i].set(u[i]).at[i + 1].add(1.0)

    start = (jnp.int32(0), lax.stop_gradient(x))
    return lax.while_loop(lambda carry: carry[0] < last, turn, start)[1]


def _either(x: Array, u: Array) -> Array:
    return lax.cond(
        u[0, 0] > 0,
        lambda x: x.at[0].set(u[0]).at[1].set(u[1]),
        lambda x: x.at[2].add(u[0]).at[0].set(u[1]),
        x,
    )


def _again(x: Array, u: Array) -> Array:
    """Write in a body that is computed again backwards."""
    body = jax.checkpoint(lambda x: jnp.tanh(x.at[0].set(u[0]).at[1].multiply(2.0)))
    return body(body(x))


def _nested(x: Array, u: Array) -> Array:
    inner = jax.jit(lambda x: x.at[0].set(u[0]))
    return jax.jit(lambda x: inner(x).at[1].set(u[1]))(x)


def _stacked_in_scan(x: Array, u: Array) -> Array:
    """Carry a stack of frames through a loop, as an environment does."""

    def turn(frames: Array, row: Array) -> tuple[Array, Array]:
        frames = frames.at[:-1].set(frames[1:]).at[-1].set(row)
        return frames, frames[0] + frames[2]

    frames, seen = lax.scan(turn, x[:4], u[:6])
    return x.at[:4].set(frames).at[4:6].add(seen[:2])


def _of_each_row(x: Array, u: Array) -> Array:
    """Write into each row where the batch says: a batched scatter."""
    places = jnp.arange(len(x), dtype=jnp.int32) % x.shape[1]
    return jax.vmap(lambda row, i: row.at[i].set(u[0, 0]).at[0].add(1.0))(x, places)


def _updated(x: Array, u: Array, *start: int) -> Array:
    return lax.dynamic_update_slice(x, u[:3], tuple(map(jnp.int32, start)))


def _update_each(x: Array, u: Array) -> Array:
    starts = jnp.arange(len(x), dtype=jnp.int32) % 6
    write = lambda row, i: lax.dynamic_update_slice(row, u[0, :3], (i,))  # noqa: E731
    return jax.vmap(write)(x, starts)


def _queue(x: Array, u: Array) -> Array:
    """Write new keys where a pointer is, as momentum contrast does."""
    pointer = drawn(u, len(x), 1)[0]
    return lax.dynamic_update_slice(x, u[:6], (pointer, jnp.int32(0)))


def _queue_half(x: Array, u: Array) -> Array:
    pointer = drawn(u, len(x), 1)[0]
    return lax.dynamic_update_slice_in_dim(x, u[: len(x) // 2], pointer, 0)


def _ring(x: Array, u: Array) -> Array:
    """Write into a ring, past whose end it begins again: a replay buffer."""
    places = (drawn(u, len(x), 1)[0] + jnp.arange(6)) % len(x)
    return x.at[places].set(u[:6])


def _dispatched(x: Array, u: Array) -> Array:
    """Send rows to experts of limited room, and add up what they make of them."""
    del u
    expert = jnp.arange(len(x), dtype=jnp.int32) * 5 % 4
    place = jnp.cumsum(jax.nn.one_hot(expert, 4, dtype=jnp.int32), 0)
    slot = jnp.take_along_axis(place, expert[:, None], 1)[:, 0] - 1
    room = jnp.zeros((4, 6, x.shape[1]), x.dtype)
    room = room.at[expert, slot].add(x, mode="drop")
    made = jnp.tanh(room) * jnp.arange(1.0, 5.0, dtype=x.dtype)[:, None, None]
    return made.at[expert, slot].get(mode="fill", fill_value=0)


def _segments(x: Array) -> Array:
    return jnp.arange(len(x), dtype=jnp.int32) * 3 % 8


WRITES: Mapping[str, Mapping[str, Pattern]] = {
    "rows": {
        "set": lambda x, u: x.at[0].set(u[1]),
        "set-set": lambda x, u: x.at[0].set(u[0]).at[1].set(u[1]),
        "set-set-number": lambda x, u: x.at[0].set(1.0).at[1].set(2.0),
        "add-add": lambda x, u: x.at[2].add(u[0]).at[3].add(u[1]),
        "mul-mul": lambda x, u: x.at[1].multiply(u[0]).at[2].multiply(2.0),
        "min-max": lambda x, u: x.at[1].min(u[0]).at[2].max(u[1]),
        "next-values": _next_values,
        "last": lambda x, u: x.at[-1].set(u[0]).at[-2].add(u[1]),
    },
    "slices": {
        "frame-stack": _frame_stack,
        "stencil": _stencil,
        "columns": _columns,
        "every-other": lambda x, u: x.at[::2].multiply(0.5).at[1::2].add(u[0]),
        "block": lambda x, u: x.at[1:6, 1:4].set(u[:5, :3]).at[2:4].add(1.0),
        "diagonal": _diagonal,
        "element": lambda x, u: x.at[2, 1].set(3.0).at[3, 0].set(u[0, 0]),
        "where": lambda x, u: jnp.where(x > u[:1], x, 0.5).at[0].set(u[1]),
    },
    "places": {
        "set-places": lambda x, u: x.at[at(*PLACES)].set(u[:5]),
        "add-again": lambda x, u: x.at[at(*AGAIN)].add(u[:5]),
        "add-own": lambda x, u: x.at[at(*NINE[: len(x)])].add(x[:9]),
        "set-own": lambda x, u: x.at[at(*PLACES)].set(x[1:6]),
        "apply": _applied,
        "apply-one": lambda x, u: 0.1 * x + lax.stop_gradient(x).at[3].apply(jnp.tanh),
        "add-drawn": lambda x, u: x.at[drawn(u, len(x))].add(u[:5]),
        "add-batch": lambda x, u: x.at[drawn(u, len(x), None)].add(u),
        "drop": lambda x, u: x.at[at(1, len(x) + 2, 3)].set(u[:3], mode="drop"),
        "clip": lambda x, u: x.at[at(1, len(x) + 2)].add(u[:2], mode="clip"),
        "negative": lambda x, u: x.at[at(-1, -3)].add(u[:2]).at[at(-2)].set(u[:1]),
        "permuted": lambda x, u: x.at[jnp.argsort(x[:, 0])].set(x),
    },
    "sums": {
        "segment-sum": lambda x, u: jax.ops.segment_sum(x, _segments(x), 8),
        "segment-max": lambda x, u: jax.ops.segment_max(x, _segments(x), 8),
        "bincount": lambda x, u: jnp.bincount(_segments(x), x[:, 0], length=8),
        "one-hot": lambda x, u: jax.nn.one_hot(_segments(x), 8).T @ x,
        "pairs": lambda x, u: x.at[at(*AGAIN), at(*PLACES) % 5].add(u[:5, 1]),
        "dispatched": _dispatched,
        "ring": _ring,
        "set-and-read": lambda x, u: x.at[at(*PLACES)].set(u[:5])[at(*NINE)],
    },
    "update-slices": {
        "update": lambda x, u: _updated(x, u, 2, 0),
        "update-past": lambda x, u: _updated(x, u, len(x) - 1, 0),
        "update-before": lambda x, u: _updated(x, u, -len(x) - 2, 0),
        "update-update": lambda x, u: _updated(_updated(x, u, 0, 0), 2 * u, 1, 0),
        "queue": _queue,
        "queue-half": _queue_half,
        "update-index": lambda x, u: lax.dynamic_update_index_in_dim(x, u[0], 3, 0),
        "update-each": _update_each,
        "update-block": lambda x, u: lax.dynamic_update_slice(x, u[:4, :3], (2, 4)),
    },
    "bodies": {
        "fori": _rows_in_turn,
        "while": _until,
        "cond": _either,
        "remat": _again,
        "nested-jit": _nested,
        "scan-stack": _stacked_in_scan,
        "vmap": _of_each_row,
    },
}
"""By group and name."""
