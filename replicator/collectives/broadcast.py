"""Give every replica the value that one of them holds."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.types import PyTree
from replicator.collectives.context import axes
from replicator.collectives.precision import move
from replicator.errors import ArgumentError, check_whole


def broadcast(
    tree: PyTree, *, source: int = 0, axis_name: str = REPLICA_AXIS
) -> PyTree:
    """Give every replica the value of `tree` on replica `source`.

    One collective per leaf, with the bytes of an all-reduce. The values of the other
    replicas do not matter, not even NaN. Differentiable: the source gets the gradient.

    Args:
      tree: Per-replica arrays of numbers or booleans; shapes agree on all replicas.
      source: The replica whose value counts, known while the step is traced.
      axis_name: Mesh axis to send over.

    Returns:
      The source's tree, equal in every bit but for the sign of a zero, on all replicas.

    Raises:
      ArgumentError: There is no replica `source`, a leaf holds neither numbers nor
        booleans, or `axis_name` is a dead axis.

    >>> jax.vmap(lambda x: broadcast(x, source=2), axis_name="replica")(jnp.arange(4))
    Array([2, 2, 2, 2], dtype=int32)
    """
    axis = axes.resolve_axis(axis_name)
    check_whole("source", source)
    if not 0 <= source < axis.size:
        raise ArgumentError(
            f"`source` must be a replica between 0 and {axis.size - 1}, got {source}. "
            "Use 0, which always exists."
        )
    tree = axes.with_arrays(tree)
    axes.check_dtypes(
        tree, (jnp.number, jnp.bool_), rule="`tree` must hold numbers or booleans"
    )
    if axis.name is None:
        return tree

    def send(leaf: Array) -> Array:
        # All others add zeros. JAX sums booleans as int32: a byte is enough here.
        number = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        sent = jnp.where(axes.position(axis) == source, number, jnp.zeros_like(number))
        return move(sent, lambda x: lax.psum(x, axis.name)).astype(leaf.dtype)

    return jax.tree.map(send, tree)
