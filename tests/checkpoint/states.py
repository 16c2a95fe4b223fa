"""States that checkpoint tests save, and how they are compared: bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.mesh import replica_mesh, replicated, split_over_replicas
from replicator.base.per_replica import PerReplica
from replicator.checkpoint import Snapshot


def small_state(number):
    """A state of NumPy arrays of which every leaf tells its number."""
    return {
        "params": {"w": np.full((4, 3), number, np.float32)},
        "count": np.full((), number, np.int32),
    }


def small_snapshot(step):
    return Snapshot(step=step, arrays=small_state(step), meta={"number": step})


def run_state(num_replicas, *, on_resize="sum"):
    """What a run on so many replicas saves: whole leaves, own leaves, keys."""
    mesh = replica_mesh(num_replicas)
    whole, own = replicated(mesh), split_over_replicas(mesh)
    partial = jnp.arange(num_replicas * 3, dtype=jnp.float32)
    return {
        "step": jax.device_put(jnp.int32(7), whole),
        "key": jax.device_put(jax.random.key(3), whole),
        "w": jax.device_put(jax.random.normal(jax.random.key(1), (5, 2)), whole),
        "sums": PerReplica(
            jax.device_put(partial.reshape(num_replicas, 3), own), on_resize
        ),
    }


def bits(tree):
    """Return leaves as (dtype, shape, bytes), keys by their data."""
    return [_bits(leaf) for leaf in jax.tree.leaves(tree)]


def _bits(leaf):
    dtype = str(leaf.dtype)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return dtype, leaf.shape, np.asarray(leaf).tobytes()
