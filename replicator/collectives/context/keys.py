"""Derive random keys per replica and per example from one key shared by all.

A step receives the same key on every replica and in every microbatch: both are cuts of
one global batch. `example_keys` folds each example's place in the global batch
(`example_places`), so that draws depend on neither cut; `replica_key` folds the replica
and the microbatch, so that draws differ from cut to cut. Both fold small integers into
what they get: do not hand one key to both, `jax.random.split` it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.trees import describe, named_leaves
from replicator.base.types import Key, PyTree
from replicator.collectives.context import axes
from replicator.collectives.context.microbatch import microbatch
from replicator.errors import ArgumentError, check_whole

RANDOM_STREAMS = 2
"""Version of how random bits follow from a run's key: counted up if that changes."""


def replica_key(key: Key, *, axis_name: str = REPLICA_AXIS) -> Key:
    """Return a key of this replica's own, in this microbatch.

    Args:
      key: A scalar key, the same on all replicas.
      axis_name: Mesh axis of the replicas.

    Returns:
      `key`, folded with the microbatch's index and then with `replica_id()`.

    Raises:
      ArgumentError: `key` is not a key, `axis_name` is a dead axis, the strategy
        partitions, or this is `init_fn`.

    >>> def noise(x, key):                # other numbers on each replica
    ...     return x + jax.random.normal(replica_key(key), x.shape)
    >>> a, b = jax.vmap(noise, (0, None), axis_name="replica")(jnp.zeros(2), key)
    >>> bool(a == b)
    False
    """
    check_key(key)
    axes.refuse_in_init("`replica_key`")
    axes.refuse_if_partitioned(
        "`replica_key`", "Use `example_keys`, or `strategies.data_parallel()`."
    )
    own = jax.random.fold_in(key, microbatch().index)
    return jax.random.fold_in(own, axes.replica_id(axis_name=axis_name))


def check_key(key: Key | None) -> None:
    """Refuse a value that is neither None nor a random key.

    Raises:
      ArgumentError: It is neither.

    >>> check_key(jax.random.key(0))
    """
    if key is not None and not hasattr(key, "dtype"):
        seed = key if isinstance(key, int) else 0
        raise ArgumentError(
            f"`key` must be a random key, got {key!r}. Pass `jax.random.key({seed})`."
        )


def refuse_keys(name: str, metrics: PyTree) -> None:
    """Refuse random keys among the metrics that the function `name` returned.

    Raises:
      ArgumentError: There is one.
    """
    for path, leaf in named_leaves(metrics):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
            raise ArgumentError(
                f"`{name}` must return metrics of numbers, got {describe(leaf)} for "
                f"`{path}`. Leave it out, or report `jax.random.key_data(key)` as "
                "`PerReplica`."
            )


def example_keys(
    key: Key, n: int, *, axis_name: str = REPLICA_AXIS
) -> Shaped[Array, "n *key"]:
    """Return one key per example, which follows the example to any cut of the batch.

    Args:
      key: A scalar key, the same on all replicas.
      n: Number of examples of this replica in this microbatch; the same in all.
      axis_name: Mesh axis of the replicas.

    Returns:
      Per-replica keys `[n]`; key i is `key` folded with `example_places(n)[i]`, the
      place of example i in the global batch.

    Raises:
      ArgumentError: `key` is not a key, `n` is not a whole number, or `axis_name` is a
        dead axis.

    >>> def noisy(x, key):
    ...     return x + jax.vmap(jax.random.normal)(example_keys(key, len(x)))
    >>> whole = noisy(jnp.zeros(4), key)
    >>> halves = jax.vmap(noisy, (0, None), axis_name="replica")(jnp.zeros((2, 2)), key)
    >>> bool((halves.reshape(4) == whole).all())
    True
    """
    check_key(key)
    places = example_places(n, axis_name=axis_name)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, places)


def example_places(n: int, *, axis_name: str = REPLICA_AXIS) -> Int32[Array, "n"]:
    """Return the place of each example in the global batch, counted from 0.

    It follows the example to any cut of the batch: for noise from a table or a
    quasi-random sequence, for pairs of neighbours, to report which examples were hard.

    Args:
      n: Number of examples of this replica in this microbatch; the same in all.
      axis_name: Mesh axis of the replicas.

    Returns:
      Per-replica int32 `[n]`; that of example i is
      `(microbatch * num_replicas() + replica_id()) * n + i`.

    Raises:
      ArgumentError: `n` is not a whole number, or `axis_name` is a dead axis.

    >>> x = jnp.ones((2, 3))
    >>> jax.vmap(lambda x: example_places(len(x)), axis_name="replica")(x)
    Array([[0, 1, 2],
           [3, 4, 5]], dtype=int32)
    """
    check_whole("n", n)
    replicas = axes.num_replicas(axis_name=axis_name)
    block = microbatch().index * replicas + axes.position(axes.resolve_axis(axis_name))
    return block * n + jnp.arange(n, dtype=jnp.int32)
