"""Add up within hosts, where links are fast, then between hosts, each device a part.

Every device of a host has the sum of its host, adds up its part of it with the devices
of the same place in the other hosts, and gathers the other parts within its host. So
1/d of the bytes goes between hosts, of a host with d devices (as in Goyal et al. 2017,
"Accurate, Large Minibatch SGD", §4).

The proof of replication refuses sums by groups, of which it cannot know that all groups
agree. Here they do: a part is the result of one sum over all hosts, and each host
gathers the same parts. So the result carries the promise of `assume_replicated`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from replicator.collectives.assume_replicated import assume_replicated
from replicator.collectives.context.axes import Axis, Groups, position
from replicator.collectives.synchronise.method import piece_of

AcrossFn = Callable[[jax.Array, Axis], tuple[jax.Array, jax.Array | None]]
"""A sum of a part over the hosts, and what this replica then owes of it."""


def hierarchical_sum(
    leaf: Num[Array, "*shape"], axis: Axis, inside: int, across_fn: AcrossFn
) -> tuple[Num[Array, "*shape"], Num[Array, "*shape"] | None]:
    """Sum one array over all replicas by way of hosts.

    Args:
      leaf: This replica's array.
      axis: All replicas, those of a host side by side.
      inside: Number of replicas of a host; it divides that of all.
      across_fn: Sum of a part over the hosts.

    Returns:
      The sum, the same on all replicas; and what `across_fn` owes, in its place of an
      array of zeros, or None.
    """
    hosts, parts = host_groups(axis.size, inside)
    whole = lax.psum(leaf, axis.name, axis_index_groups=hosts).reshape(-1)
    part = piece_of(whole.size, inside)
    padded = jnp.pad(whole, (0, part * inside - whole.size))
    start = position(axis) % inside * part
    own = lax.dynamic_slice(padded, (start,), (part,))
    summed, owed = across_fn(own, Axis(name=axis.name, size=axis.size, groups=parts))
    gathered = lax.all_gather(summed, axis.name, axis_index_groups=hosts, tiled=True)
    result = assume_replicated(gathered[: whole.size].reshape(leaf.shape))
    if owed is None:
        return result, None
    placed = lax.dynamic_update_slice(jnp.zeros_like(padded), owed, (start,))
    return result, placed[: whole.size].reshape(leaf.shape)


def host_groups(num_replicas: int, inside: int) -> tuple[Groups, Groups]:
    """Return the replicas of each host, and those of the same place in all hosts.

    >>> host_groups(4, 2)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    hosts = tuple(
        tuple(range(first, first + inside)) for first in range(0, num_replicas, inside)
    )
    return hosts, tuple(zip(*hosts, strict=True))
