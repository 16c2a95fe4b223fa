"""Derive random keys per replica and per example from one key shared by all.

A step receives the same key on every replica. `replica_key` makes it differ, so draws
depend on how many replicas there are; `example_keys` names each example by its position
in the global microbatch, so draws do not. They do depend on how many microbatches there
are: the key of a step is folded with the microbatch. Both fold a small integer into
what they get: do not hand one key to both, `jax.random.split` it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from replicator.collectives.axes import replica_id
from replicator.errors import ArgumentError, check_whole
from replicator.mesh import REPLICA_AXIS
from replicator.protocols import Key


def replica_key(key: Key, *, axis_name: str = REPLICA_AXIS) -> Key:
    """Return a key that differs from replica to replica.

    Args:
      key: A scalar key, the same on all replicas.
      axis_name: Mesh axis of the replicas.

    Returns:
      `jax.random.fold_in(key, replica_id())`.

    Raises:
      ArgumentError: `key` is no key, or `axis_name` is a dead axis.
    """
    check_key(key)
    return jax.random.fold_in(key, replica_id(axis_name=axis_name))


def check_key(key: Key | None) -> None:
    """Refuse what is neither None nor a random key.

    Raises:
      ArgumentError: It is not.
    """
    if key is not None and not hasattr(key, "dtype"):
        seed = key if isinstance(key, int) else 0
        raise ArgumentError(
            f"`key` must be a random key, got {key!r}. Pass `jax.random.key({seed})`."
        )


def example_keys(
    key: Key, n: int, *, axis_name: str = REPLICA_AXIS
) -> Shaped[Array, "n *key"]:
    """Return one key per example, which follows the example to any replica count.

    Args:
      key: A scalar key, the same on all replicas.
      n: How many examples this replica has; the same on all replicas.
      axis_name: Mesh axis of the replicas.

    Returns:
      Per-replica keys `[n]`; key i is `key` folded with `replica_id() * n + i`.

    Raises:
      ArgumentError: `key` is no key, `n` no whole number, or `axis_name` a dead axis.
    """
    check_key(key)
    check_whole("n", n)
    first = replica_id(axis_name=axis_name) * n
    positions = first + jnp.arange(n, dtype=jnp.int32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, positions)
