"""Collect every replica's value, so that each replica holds all of them."""

import functools
from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array, Shaped

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.collectives.context import axes
from replicator.collectives.markers import mark_alone
from replicator.collectives.precision import move
from replicator.errors import ArgumentError


def all_gather(
    tree: PyTree,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    axis_name: str = REPLICA_AXIS,
) -> PyTree:
    """Give every replica the values of all replicas, in replica order.

    One collective per leaf; differentiable. Cotangents of float16 add up in float32.

    Args:
      tree: Per-replica arrays; leaf shapes agree on all replicas. Any dtype.
      groups: Replica ids that gather among themselves, in groups of one size.
      tiled: Concatenate along axis 0 instead of adding an axis.
      axis_name: Mesh axis to gather over.

    Returns:
      For each leaf `[...]` an array `[replicas, ...]`; with `tiled`, for each leaf
      `[n, ...]` an array `[replicas * n, ...]`. The same on every replica of a group.

    Raises:
      ArgumentError: `groups` is not an equal partition of the replicas, `axis_name` is
        a dead axis, or a scalar leaf was to be concatenated.

    >>> jax.vmap(all_gather, axis_name="replica")(jnp.array([3, 5]))
    Array([[3, 5],
           [3, 5]], dtype=int32)
    """
    axis = axes.resolve_equal_axis(axis_name, groups)
    tree = axes.with_arrays(tree)
    for path, leaf in named_leaves(tree):
        if tiled and leaf.ndim == 0:
            raise ArgumentError(
                f"`tree` must hold leaves with an axis 0 for `tiled=True`, got a "
                f"scalar{axes.at_leaf(path)}. Leave `tiled` out."
            )
    return jax.tree.map(lambda leaf: gather_leaf(leaf, axis, tiled=tiled), tree)


def gather_leaf(
    leaf: Shaped[Array, "*shape"], axis: axes.Axis, *, tiled: bool = False
) -> Shaped[Array, "..."]:
    """Stack one array over the replicas of `axis`; with `tiled` join its rows."""
    if axis.name is None:
        return mark_alone(leaf if tiled else leaf[None], "all_gather")
    gather = functools.partial(
        lax.all_gather, axis_name=axis.name, axis_index_groups=axis.groups, tiled=tiled
    )
    return move(leaf, gather)
