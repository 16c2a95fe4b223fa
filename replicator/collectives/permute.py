"""Send values from replica to replica along named pairs, such as round a ring."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.types import PyTree
from replicator.collectives.context import axes
from replicator.errors import ArgumentError

Pairs = Sequence[tuple[int, int]]


def permute(tree: PyTree, pairs: Pairs, *, axis_name: str = REPLICA_AXIS) -> PyTree:
    """Send each leaf along `pairs` of (source, destination) replicas.

    One collective per leaf; differentiable.

    Args:
      tree: Per-replica arrays; shapes agree on all replicas.
      pairs: Senders and receivers: no replica sends twice or receives twice.
      axis_name: Mesh axis to send over.

    Returns:
      A tree of the same structure, shapes and dtypes: the arrays that this replica
      received, or zeros if none sends to it.

    Raises:
      ArgumentError: A pair names a replica that does not exist, a replica sends or
        receives twice, or `axis_name` is a dead axis.

    >>> jax.vmap(lambda x: permute(x, [(0, 1), (1, 0)]), axis_name="replica")(
    ...     jnp.array([3, 5])
    ... )
    Array([5, 3], dtype=int32)
    """
    axis = axes.resolve_axis(axis_name)
    checked = _checked_pairs(pairs, axis)
    tree = axes.with_arrays(tree)
    if axis.name is None:
        return tree if checked else jax.tree.map(jnp.zeros_like, tree)
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis.name, checked), tree)


def ring_pairs(shift: int = 1, *, axis_name: str = REPLICA_AXIS) -> Pairs:
    """Pair each replica with the one `shift` places on, round a ring.

    Args:
      shift: How far to send; negative sends backwards.
      axis_name: Mesh axis that is closed to a ring.

    Returns:
      Pairs for `permute`, one per replica.

    Raises:
      ArgumentError: `axis_name` is a dead axis.

    >>> jax.vmap(lambda x: permute(x, ring_pairs()), axis_name="replica")(jnp.arange(3))
    Array([2, 0, 1], dtype=int32)
    """
    size = axes.num_replicas(axis_name=axis_name)
    return [(replica, (replica + shift) % size) for replica in range(size)]


def _checked_pairs(pairs: Pairs, axis: axes.Axis) -> list[tuple[int, int]]:
    try:
        checked = [(int(source), int(destination)) for source, destination in pairs]
    except (TypeError, ValueError) as failure:
        raise ArgumentError(
            f"`pairs` must be a list of (source, destination), got {pairs!r}. "
            "Use `ring_pairs()` for a valid list."
        ) from failure
    sources, destinations = [s for s, _ in checked], [d for _, d in checked]
    known = all(0 <= replica < axis.size for replica in sources + destinations)
    once = all(len(set(side)) == len(side) for side in (sources, destinations))
    if not known or not once:
        raise ArgumentError(
            f"`pairs` must name replicas between 0 and {axis.size - 1}, each at most "
            f"once as source and once as destination, got {checked}. "
            "Use `ring_pairs()` for a valid list."
        )
    return checked
