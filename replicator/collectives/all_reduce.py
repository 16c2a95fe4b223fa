"""Combine a value over replicas so that every replica holds the result."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.trees import describe
from replicator.base.types import PyTree
from replicator.collectives.all_gather import gather_leaf
from replicator.collectives.context.axes import (
    Axis,
    check_dtypes,
    position,
    resolve_axis,
    resolve_equal_axis,
    with_arrays,
)
from replicator.collectives.markers import mark_alone
from replicator.collectives.ordered import ordered_sum_leaf
from replicator.collectives.precision import (
    like_leaf,
    on_wire,
    sum_dtype,
    wire_dtype,
)
from replicator.errors import ArgumentError, check_word

REDUCE_OPS = ("sum", "mean", "max", "min", "product")
REDUCTIONS = ("fast", "ordered")

_SumFn = Callable[[Array, Axis], Array]

# The integer mean is refused, not rounded and not promoted: a result keeps its dtype.
_ACCEPTED = {
    "sum": ((jnp.number,), "numbers"),
    "mean": ((jnp.inexact,), "floating-point leaves"),
    "max": ((jnp.integer, jnp.floating, jnp.bool_), "ordered numbers or booleans"),
    "min": ((jnp.integer, jnp.floating, jnp.bool_), "ordered numbers or booleans"),
    "product": ((jnp.number,), "numbers"),
}


def all_reduce(
    tree: PyTree,
    op: str = "mean",
    *,
    weight: ArrayLike | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    reduction: str = "fast",
    axis_name: str = REPLICA_AXIS,
) -> PyTree:
    """Combine each leaf of `tree` over replicas; all replicas get the result.

    One collective of the leaf's own size per leaf, except for `product` and for
    `reduction="ordered"`, which gather. Differentiable: for `max` and `min`, replicas
    that tie share the gradient equally. On booleans `max` means any and `min` all.

    Sums and means of float16 (and float8) are taken in float32, also on the wire, which
    is twice the bytes of the leaf; so are those of cotangents. bfloat16 travels as it
    is. Integers keep their dtype, and wrap.

    Args:
      tree: Per-replica arrays; leaf shapes agree on all replicas.
      op: "sum", "mean", "max", "min" or "product". A mean takes no integers.
      weight: This replica's share in the mean, such as its number of examples: a
        scalar ≥ 0. A replica of weight 0 does not count, not even by a NaN.
      groups: Replica ids that reduce among themselves; sizes may differ.
      reduction: "fast", or "ordered" for sums whose bits do not depend on how the
        backend adds up: replica 0 first, then 1, and so on.
      axis_name: Mesh axis to reduce over.

    Returns:
      A tree of the same structure, shapes and dtypes, the same on every replica of a
      group. A mean whose total weight is zero is zero.

    Raises:
      ArgumentError: `op` or `reduction` is unknown, they do not go together, `weight`
        is not a scalar or not for a mean, a leaf's dtype does not suit `op`, `groups`
        is not a partition of the replicas, or `axis_name` is a dead axis.

    Outside of a step there is one replica:

    >>> all_reduce(jnp.array([1.0, 2.0]), op="sum")
    Array([1., 2.], dtype=float32)

    Four replicas, and their mean by numbers of examples:

    >>> losses, examples = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([4, 4, 4, 0])
    >>> jax.vmap(lambda loss, n: all_reduce(loss, weight=n), axis_name="replica")(
    ...     losses, examples
    ... )
    Array([2., 2., 2., 2.], dtype=float32)
    """
    check_word("op", op, REDUCE_OPS)
    _check_reduction(reduction, op)
    needs_equal = op == "product" or reduction == "ordered"
    axis = (resolve_equal_axis if needs_equal else resolve_axis)(axis_name, groups)
    tree = with_arrays(tree)
    check_op_dtypes(tree, op)
    sum_leaf = ordered_sum_leaf if reduction == "ordered" else _sum_leaf
    if weight is not None:
        share = share_of(_checked_weight(weight, op), axis, sum_leaf)
        combine = functools.partial(_weighted_mean_leaf, share=share, sum_leaf=sum_leaf)
    else:
        combine = _combine_fn(op, sum_leaf)
    return jax.tree.map(lambda leaf: like_leaf(combine(leaf, axis), leaf), tree)


def check_op_dtypes(
    tree: PyTree, op: str, *, subject: str = "`tree` must hold"
) -> None:
    """Refuse a leaf whose dtype means nothing under `op`.

    Args:
      tree: Arrays.
      op: The reduction.
      subject: Beginning of the error message.

    Raises:
      ArgumentError: There is one.
    """
    accepted, kinds = _ACCEPTED[op]
    check_dtypes(tree, accepted, rule=f"{subject} {kinds} for `op='{op}'`")


def _check_reduction(reduction: str, op: str) -> None:
    check_word("reduction", reduction, REDUCTIONS)
    if reduction == "ordered" and op not in ("sum", "mean"):
        raise ArgumentError(
            f"`op` must be 'sum' or 'mean' for `reduction='ordered'`, got {op!r}. "
            "Leave `reduction` out."
        )


def _checked_weight(weight: ArrayLike, op: str) -> Float[Array, ""]:
    if op != "mean":
        raise ArgumentError(
            f"`weight` must come with `op='mean'`, got `op={op!r}`. Multiply the "
            "leaves by the weight instead."
        )
    scalar = jnp.asarray(weight)
    if scalar.ndim or not jnp.isrealobj(scalar):
        raise ArgumentError(
            f"`weight` must be one real number per replica, got {describe(scalar)}. "
            "Weigh and sum the examples of a replica before the call."
        )
    return scalar.astype(float)


def share_of(
    weight: Float[Array, ""], axis: Axis, sum_leaf: _SumFn | None = None
) -> Float[Array, ""]:
    """Return the share of this replica in a mean over all, 0 if all weigh nothing."""
    # Shares, not weights, multiply the leaves: a count of tokens overflows float16 and
    # is rounded by bfloat16; a share does neither, and leaves keep their own dtype.
    total = (sum_leaf or _sum_leaf)(weight, axis)
    return jnp.where(total == 0, 0.0, weight / jnp.where(total == 0, 1.0, total))


def weighted_term(leaf: Array, share: Float[Array, ""]) -> Array:
    """Return the term of this replica in a weighted mean, in the dtype of the sum."""
    # Only NaN and infinity are taken out: the gradient in the weight stays right.
    ignored = (share == 0) & ~jnp.isfinite(leaf)
    counted = jnp.where(ignored, jnp.zeros_like(leaf), leaf)
    wide = sum_dtype(leaf.dtype)
    shared = counted.astype(wide) * share.astype(wide)
    # Narrow again where sums may be narrow, so that bfloat16 travels as it is.
    return shared.astype(wire_dtype(leaf.dtype))


def _weighted_mean_leaf(
    leaf: Array, axis: Axis, *, share: Float[Array, ""], sum_leaf: _SumFn
) -> Array:
    return sum_leaf(weighted_term(leaf, share), axis)


def _combine_fn(op: str, sum_leaf: _SumFn) -> Callable[[Array, Axis], Array]:
    return {
        "sum": sum_leaf,
        "mean": functools.partial(_mean_leaf, sum_leaf=sum_leaf),
        "max": functools.partial(_extreme_leaf, op="max"),
        "min": functools.partial(_extreme_leaf, op="min"),
        "product": _product_leaf,
    }[op]


def _sum_leaf(leaf: Array, axis: Axis) -> Array:
    if axis.name is None:
        return mark_alone(leaf, "all_reduce")
    return lax.psum(on_wire(leaf), axis.name, axis_index_groups=axis.groups)


def _mean_leaf(leaf: Array, axis: Axis, *, sum_leaf: _SumFn) -> Array:
    total = sum_leaf(leaf, axis)
    return total / _group_size_of_this(axis, total.dtype)


def _group_size_of_this(axis: Axis, dtype: jnp.dtype) -> int | Array:
    # Not `psum(1)`: under unequal groups JAX takes the first group's size for all.
    if axis.groups is None or len({len(group) for group in axis.groups}) == 1:
        return axis.group_size
    sizes = {replica: len(group) for group in axis.groups for replica in group}
    table = jnp.asarray([sizes[replica] for replica in range(axis.size)], dtype)
    return table[position(axis)]


def _product_leaf(leaf: Array, axis: Axis) -> Array:
    wide = sum_dtype(leaf.dtype)
    return jnp.prod(gather_leaf(leaf, axis).astype(wide), axis=0, dtype=wide)


def _extreme_leaf(leaf: Array, axis: Axis, *, op: str) -> Array:
    if axis.name is None:
        return mark_alone(leaf, "all_reduce")
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return _differentiable_extreme(leaf, axis, op)
    return _extreme(leaf, axis, op)


def _extreme(leaf: Array, axis: Axis, op: str) -> Array:
    reduce = {"max": lax.pmax, "min": lax.pmin}[op]
    return reduce(leaf, axis.name, axis_index_groups=axis.groups)


# JAX gives `pmax` no derivative.
_differentiable_extreme = jax.custom_jvp(_extreme, nondiff_argnums=(1, 2))


@_differentiable_extreme.defjvp
def _extreme_jvp(
    axis: Axis, op: str, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (leaf,), (tangent,) = primals, tangents
    # The barrier makes the comparison see the same bits as the collective: XLA may
    # otherwise keep a bfloat16 leaf at a higher precision in one of the two places.
    leaf = lax.optimization_barrier(leaf)
    best = _differentiable_extreme(leaf, axis, op)
    wins = (leaf == best).astype(leaf.dtype)
    shared = _sum_leaf(wins * tangent, axis) / _sum_leaf(wins, axis)
    return best, like_leaf(shared, leaf)
