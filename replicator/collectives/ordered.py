"""Add values in replica order, so that bits do not depend on how a backend reduces.

Floating-point addition depends on its order, and an all-reduce chooses its own. Here a
sum over blocks is taken one block after the other, by a scan whose body is the same
program for any number of replicas. Cut a batch into a fixed number of equal blocks, as
replicas × microbatches: block j·N + r is replica r's part of microbatch j. Calling
`add_in_order` once per microbatch then adds the blocks 0, 1, 2, … whatever N is.

The price: every replica receives the values of all others, not only their sum.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.trees import first_difference
from replicator.base.types import PyTree
from replicator.collectives.all_gather import gather_leaf
from replicator.collectives.context.axes import Axis, resolve_axis, with_arrays
from replicator.collectives.precision import sum_dtype
from replicator.errors import ArgumentError


def add_in_order(
    total: PyTree, tree: PyTree, *, axis_name: str = REPLICA_AXIS
) -> PyTree:
    """Add every replica's `tree` to `total`: total + x_0 + x_1 + … from left to right.

    Args:
      total: The sum so far, the same on all replicas.
      tree: Per-replica arrays of the structure, shapes and dtypes of `total`.
      axis_name: Mesh axis to add over.

    Returns:
      The new sum, of the structure of `total` and the same on all replicas.

    Raises:
      ArgumentError: `tree` does not fit `total`, or `axis_name` is a dead axis.

    >>> add_in_order(jnp.array(1.0), jnp.array(2.0))     # outside of a step
    Array(3., dtype=float32)
    """
    axis = resolve_axis(axis_name)
    total, tree = with_arrays(total), with_arrays(tree)
    if difference := first_difference(total, tree):
        raise ArgumentError(
            f"`tree` must have the structure, shapes and dtypes of `total`, got a tree "
            f"where {difference}. Start from zeros like `tree`."
        )
    return jax.tree.map(lambda sum_, leaf: _add_leaf(sum_, leaf, axis), total, tree)


def ordered_sum_leaf(
    leaf: Shaped[Array, "*shape"], axis: Axis
) -> Shaped[Array, "*shape"]:
    """Sum one array over the replicas of `axis` in replica order, as `sum_dtype`."""
    return _add_leaf(jnp.zeros_like(leaf, sum_dtype(leaf.dtype)), leaf, axis)


def _add_leaf(total: Array, leaf: Array, axis: Axis) -> Array:
    def add(so_far: Array, block: Array) -> tuple[Array, None]:
        return so_far + block.astype(so_far.dtype), None

    return lax.scan(add, total, gather_leaf(leaf, axis))[0]
