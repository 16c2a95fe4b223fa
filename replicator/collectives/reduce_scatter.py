"""Combine a value over replicas and leave each replica one slice of the result."""

from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.types import PyTree
from replicator.collectives.all_reduce import check_op_dtypes
from replicator.collectives.context.axes import (
    check_divides,
    resolve_equal_axis,
    with_arrays,
)
from replicator.collectives.precision import like_leaf, on_wire
from replicator.errors import check_word

SCATTER_OPS = ("sum", "mean")


def reduce_scatter(
    tree: PyTree,
    op: str = "mean",
    *,
    groups: Sequence[Sequence[int]] | None = None,
    axis_name: str = REPLICA_AXIS,
) -> PyTree:
    """Combine each leaf over replicas; replica r gets slice r of the result's axis 0.

    `all_gather(…, tiled=True)` of the result is what `all_reduce` returns. One
    collective per leaf, of half the bytes of an all-reduce; differentiable. As there,
    float16 is added in float32, also on the wire (twice its bytes).

    Args:
      tree: Per-replica arrays `[n, ...]`, where n divides by the number of replicas.
      op: "mean" or "sum". A mean takes no integers.
      groups: Replica ids that reduce among themselves, in groups of one size. The slice
        is then that of the replica's place in its group.
      axis_name: Mesh axis to reduce over.

    Returns:
      A tree of the same structure and dtypes with leaves `[n / replicas, ...]`, which
      differ between replicas.

    Raises:
      ArgumentError: `op` is unknown, a leaf does not divide or its dtype does not suit
        `op`, `groups` is not an equal partition, or `axis_name` is a dead axis.

    >>> jax.vmap(reduce_scatter, axis_name="replica")(jnp.array([[1.0, 2], [3.0, 4]]))
    Array([[2.],
           [3.]], dtype=float32)
    """
    check_word("op", op, SCATTER_OPS)
    axis = resolve_equal_axis(axis_name, groups)
    tree = with_arrays(tree)
    check_op_dtypes(tree, op)
    check_divides(tree, axis)
    if axis.name is None:
        return tree

    def combine(leaf: Array) -> Array:
        total = lax.psum_scatter(
            on_wire(leaf), axis.name, axis_index_groups=axis.groups, tiled=True
        )
        mean = total / axis.group_size if op == "mean" else total
        return like_leaf(mean, leaf)

    return jax.tree.map(combine, tree)
