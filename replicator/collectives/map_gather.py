"""Spread work that every replica could do alone over the replicas.

The items are known while the step is traced and equal on all replicas; the canonical
use is inverting a list of matrices. Items of one structure, shape and dtype form a
group: n items are filled up to a multiple of the N replicas, and each replica works on
⌈n / N⌉ of them, never more. A shape that occurs once is thus computed by every replica.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.trees import describe, first_difference
from replicator.base.types import PyTree
from replicator.collectives.all_gather import all_gather
from replicator.collectives.all_reduce import (
    REDUCE_OPS,
    all_reduce,
    check_op_dtypes,
)
from replicator.collectives.context.axes import (
    Axis,
    position,
    resolve_axis,
    with_arrays,
)
from replicator.collectives.precision import sum_dtype, wire_dtype
from replicator.errors import ArgumentError, check_function, check_word

WorkFn = Callable[[PyTree], PyTree]
_PICKS = ("max", "min")  # they pick one of the results, and need no wider dtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Items of one shape: their places in the user's list, and a filler."""

    places: list[int]
    items: list[PyTree]
    filler: PyTree


def map_gather(
    fn: WorkFn,
    items: Sequence[PyTree],
    *,
    pad: PyTree | Callable[[PyTree], PyTree] | None = None,
    axis_name: str = REPLICA_AXIS,
) -> list[PyTree]:
    """Apply `fn` to each item, the work split over replicas; all get all results.

    One gather per group of items and result leaf; differentiable. Outside any replica
    context `fn` is called on each item in turn.

    Args:
      fn: Pure function of one item, without collectives.
      items: Pytrees of arrays, equal on all replicas.
      pad: A harmless item to fill up with, or, for items of several shapes, a function
        from an item to a filler of its shape. By default a group's first item.
      axis_name: Mesh axis to spread over.

    Returns:
      `[fn(item) for item in items]`, the same on all replicas.

    Raises:
      ArgumentError: There are no items, `pad` fits none of them or cannot fit them all,
        or `axis_name` is a dead axis.

    >>> inverses = map_gather(jnp.linalg.inv, [2.0 * jnp.eye(3), 4.0 * jnp.eye(5)])
    >>> [float(inverse[0, 0]) for inverse in inverses]
    [0.5, 0.25]
    """
    axis = resolve_axis(axis_name)
    groups = _grouped(fn, items, pad)
    if axis.name is None:
        return [fn(with_arrays(item)) for item in items]
    results: list[PyTree] = [None] * len(items)
    for group in groups:
        _, work = _share_of(group, axis)
        found = all_gather(lax.map(fn, work), tiled=True, axis_name=axis.name)
        for row, place in enumerate(group.places):
            results[place] = _row(found, row)
    return results


def map_reduce(
    fn: WorkFn,
    items: Sequence[PyTree],
    *,
    op: str = "sum",
    pad: PyTree | Callable[[PyTree], PyTree] | None = None,
    axis_name: str = REPLICA_AXIS,
) -> PyTree:
    """Combine `fn(item)` over all items, the work split over replicas.

    Each replica combines its share as it goes, and one all-reduce per result leaf joins
    them: no replica ever holds all results. Differentiable. Each replica adds and
    multiplies in float32 at least; on the wire float16 is float32, bfloat16 is not.

    Args:
      fn: Pure function of one item, without collectives, whose result has the same
        shapes for every item.
      items: Pytrees of arrays, equal on all replicas.
      op: "sum", "mean" over items, "max", "min" or "product".
      pad: As in `map_gather`; the result of a filler does not count.
      axis_name: Mesh axis to spread over.

    Returns:
      The combined result, the same on all replicas.

    Raises:
      ArgumentError: `op` is unknown or does not suit a result's dtype, results differ
        in shape, there are no items, `pad` does not fit, or `axis_name` is a dead axis.

    >>> float(map_reduce(jnp.linalg.det, [2.0 * jnp.eye(2), 3.0 * jnp.eye(2)]))
    13.0
    """
    check_word("op", op, REDUCE_OPS)
    axis = resolve_axis(axis_name)
    groups = _grouped(fn, items, pad)
    shapes = _result_shape(fn, groups)
    total = _identities(shapes, op)
    for group in groups:
        total = _fold(fn, total, group, axis=axis, op=op)
    if op not in _PICKS:
        total = _as(total, shapes, wire_dtype)
    total = all_reduce(total, "sum" if op == "mean" else op, axis_name=axis_name)
    if op == "mean":
        total = jax.tree.map(lambda leaf: leaf / len(items), total)
    return _as(total, shapes, jnp.dtype)


def _grouped(fn: WorkFn, items: Sequence[PyTree], pad: PyTree) -> list[_Group]:
    check_function("fn", fn)
    if not isinstance(items, list | tuple):
        raise ArgumentError(
            f"`items` must be a list of work items, got `{type(items).__name__}`. Put "
            "them in a list."
        )
    if not items:
        raise ArgumentError(
            "`items` must hold at least one work item, got none. Leave out the call."
        )
    by_shape: dict[tuple, list[int]] = {}
    arrays = [with_arrays(item) for item in items]
    for place, item in enumerate(arrays):
        leaves, structure = jax.tree.flatten(item)
        key = (structure, *(describe(leaf) for leaf in leaves))
        by_shape.setdefault(key, []).append(place)
    if len(by_shape) > 1 and pad is not None and not callable(pad):
        raise ArgumentError(
            f"`pad` must be a function of an item for items of {len(by_shape)} shapes, "
            f"got one filler. Pass `lambda item: …` that returns a filler of its shape."
        )
    return [_group(places, arrays, pad) for places in by_shape.values()]


def _group(places: list[int], arrays: list[PyTree], pad: PyTree) -> _Group:
    items = [arrays[place] for place in places]
    if pad is None:
        return _Group(places=places, items=items, filler=items[0])
    filler = with_arrays(pad(items[0]) if callable(pad) else pad)
    if difference := first_difference(items[0], filler):
        raise ArgumentError(
            f"`pad` must have the structure, shapes and dtypes of the item it stands "
            f"for, got a filler where {difference}. Leave it out to repeat an item."
        )
    return _Group(places=places, items=items, filler=filler)


def _share_of(group: _Group, axis: Axis) -> tuple[Int[Array, "share"], PyTree]:
    """Cut out this replica's items, stacked, with their rows in the padded group."""
    share = -(-len(group.items) // axis.size)
    fillers = [group.filler] * (share * axis.size - len(group.items))
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *group.items, *fillers)
    first = position(axis) * share
    work = jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, first, share), stacked
    )
    return first + jnp.arange(share, dtype=jnp.int32), work


def _row(tree: PyTree, row: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[row], tree)


def _result_shape(fn: WorkFn, groups: list[_Group]) -> PyTree:
    shapes = [jax.eval_shape(fn, group.items[0]) for group in groups]
    for shape in shapes[1:]:
        if difference := first_difference(shapes[0], shape):
            raise ArgumentError(
                f"`fn` must return the same shapes for every item, got a result where "
                f"{difference}. Use `map_gather` for results that differ."
            )
    return shapes[0]


def _identities(shapes: PyTree, op: str) -> PyTree:
    check_op_dtypes(shapes, op, subject="`fn` must return")
    dtype_of = jnp.dtype if op in _PICKS else sum_dtype
    return jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, _identity_of(op, dtype_of(leaf.dtype))),
        shapes,
    )


def _identity_of(op: str, dtype: jnp.dtype) -> Array:
    if op in ("sum", "mean"):
        return jnp.zeros((), dtype)
    if op == "product":
        return jnp.ones((), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(op == "min")
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(jnp.inf if op == "min" else -jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.max if op == "min" else limits.min, dtype)


def _fold(fn: WorkFn, total: PyTree, group: _Group, *, axis: Axis, op: str) -> PyTree:
    combine = {
        "sum": jnp.add,
        "mean": jnp.add,
        "max": jnp.maximum,
        "min": jnp.minimum,
        "product": jnp.multiply,
    }[op]

    def join(so_far: PyTree, item: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x, y: combine(x, jnp.asarray(y, x.dtype)), so_far, fn(item)
        )

    if axis.name is None:
        return functools.reduce(join, group.items, total)

    def step(so_far: PyTree, work: tuple[Array, PyTree]) -> tuple[PyTree, None]:
        row, item = work
        return _where(row < len(group.items), join(so_far, item), so_far), None

    return lax.scan(step, total, _share_of(group, axis))[0]


def _as(tree: PyTree, shapes: PyTree, dtype_of: Callable[..., jnp.dtype]) -> PyTree:
    return jax.tree.map(
        lambda leaf, like: leaf.astype(dtype_of(like.dtype)), tree, shapes
    )


def _where(condition: Array, chosen: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(functools.partial(jnp.where, condition), chosen, other)
