"""Let every replica send a different slice to every other."""

import functools
from collections.abc import Sequence

import jax
from jax import lax

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.types import PyTree
from replicator.collectives.context.axes import (
    check_divides,
    resolve_equal_axis,
    with_arrays,
)


def all_to_all(
    tree: PyTree,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    axis_name: str = REPLICA_AXIS,
) -> PyTree:
    """Cut axis 0 into one slice per replica, send slice r to replica r, and join.

    Calling it twice gives back the input. One collective per leaf; differentiable.

    Args:
      tree: Per-replica arrays `[n, ...]`, where n divides by the number of replicas.
      groups: Replica ids that exchange among themselves, in groups of one size.
      axis_name: Mesh axis to exchange over.

    Returns:
      A tree of the same structure, shapes and dtypes: the slices that were sent to this
      replica, in the order of their senders.

    Raises:
      ArgumentError: A leaf does not divide, `groups` is not an equal partition, or
        `axis_name` is a dead axis.

    >>> jax.vmap(all_to_all, axis_name="replica")(jnp.array([[0, 1], [2, 3]]))
    Array([[0, 2],
           [1, 3]], dtype=int32)
    """
    axis = resolve_equal_axis(axis_name, groups)
    tree = with_arrays(tree)
    check_divides(tree, axis)
    if axis.name is None:
        return tree
    exchange = functools.partial(
        lax.all_to_all,
        axis_name=axis.name,
        split_axis=0,
        concat_axis=0,
        axis_index_groups=axis.groups,
        tiled=True,
    )
    return jax.tree.map(exchange, tree)
