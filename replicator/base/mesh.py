"""Build the mesh of replicas, name its shardings, and put whole values under them.

Nothing else builds meshes, and nothing else knows how a value that each process has
gets to devices of which each process has some.

A replicating strategy has one axis, `replica`, of Auto type: `jax.make_mesh` would
build an Explicit one, over which `shard_map` refuses plain NumPy arguments. A
partitioning one has the axes of its strategy, all of them automatic: a mesh that is
manual and automatic at once breaks compilers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from replicator.base.types import Device, PyTree
from replicator.errors import ArgumentError, check_whole

REPLICA_AXIS = "replica"


def replica_mesh(
    num_replicas: int | None = None, *, devices: Sequence[Device] | None = None
) -> Mesh:
    """Arrange devices as replicas, one device each.

    Args:
      num_replicas: How many; the first so many devices are used. `None` takes all.
      devices: Devices to choose from; JAX's own list by default, those of one process
        side by side.

    Returns:
      A mesh whose only axis is `replica`.

    Raises:
      ArgumentError: There are not that many devices, or none of this process's is used,
        or `devices` is no list of them.
    """
    if devices is None:
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
    found = listed_devices(devices)
    if num_replicas is not None:
        check_whole("num_replicas", num_replicas)
    wanted = len(found) if num_replicas is None else num_replicas
    if not 1 <= wanted <= len(found):
        raise ArgumentError(
            f"`num_replicas` must be between 1 and the {len(found)} devices that JAX "
            f"sees, got {num_replicas}. For a try on one machine call "
            f"`replicator.fake_devices({max(wanted, 1)})` before anything else."
        )
    mesh = Mesh(np.asarray(found[:wanted], dtype=object), (REPLICA_AXIS,))
    if not mesh.local_devices:
        raise ArgumentError(
            f"`num_replicas` must leave each of {jax.process_count()} processes a "
            f"device, got {wanted} and none in process {jax.process_index()}. Take all "
            "devices, or start fewer processes."
        )
    return mesh


def partition_mesh(sizes: Mapping[str, int], devices: Sequence[Device]) -> Mesh:
    """Arrange devices under several axes, the last one over devices side by side.

    Args:
      sizes: The size of each axis; the first so many devices are used.
      devices: At least as many as the product of sizes.
    """
    found = list(devices)[: math.prod(sizes.values())]
    grid = np.asarray(found, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes))


def listed_devices(devices: Any) -> list[Device]:
    """Return the devices of an argument.

    Raises:
      ArgumentError: It is no list of devices, or an empty one, or names one twice.
    """
    found = list(devices) if isinstance(devices, Iterable) else []
    if not found or not all(hasattr(each, "process_index") for each in found):
        count = devices if isinstance(devices, int) and devices > 0 else 1
        raise ArgumentError(
            f"`devices` must be a list of JAX's devices, got {devices!r}. Pass those "
            f"that you mean: `jax.devices()[:{count}]`."
        )
    if twice := next((each for n, each in enumerate(found) if each in found[:n]), None):
        raise ArgumentError(
            f"`devices` must name each device once, got {twice} twice. Leave one out: "
            "a device runs one replica."
        )
    return found


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_over_replicas(mesh: Mesh, *, axis: int = 0) -> NamedSharding:
    """Return the sharding of a value whose array axis `axis` is cut over replicas."""
    return NamedSharding(mesh, replica_spec(axis))


def replica_spec(axis: int = 0) -> PartitionSpec:
    """Return the spec that cuts array axis `axis` over replicas."""
    return PartitionSpec(*[None] * axis, REPLICA_AXIS)


def spans_processes(mesh: Mesh) -> bool:
    """Tell whether devices of other processes are in a mesh."""
    return len(mesh.local_devices) < mesh.size


def readable(tree: PyTree, mesh: Mesh) -> PyTree:
    """Gather, in a traced program, what each process is to read of all replicas."""
    if not spans_processes(mesh):
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Put values that every process holds whole on the devices of all.

    Unlike `jax.device_put` it asks no other process: all of them call it alike.

    Args:
      tree: NumPy arrays, or arrays of JAX; those that lie right stay.
      shardings: A list with that of each leaf; or a prefix of the tree.

    Returns:
      Global arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    # Leaf by leaf: nodes that check what they are built of take arrays alone.
    if isinstance(shardings, Sharding):
        shardings = [shardings] * len(leaves)
    elif not isinstance(shardings, list) or len(shardings) != len(leaves):
        shardings = jax.tree.leaves(jax.tree.broadcast(shardings, tree))
    if all(sharding.is_fully_addressable for sharding in shardings):
        return structure.unflatten(jax.device_put(leaves, shardings))
    return structure.unflatten(map(_put, leaves, shardings))


def _put(leaf: Any, sharding: Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array):
        if leaf.sharding == sharding:
            return leaf
        if not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)  # all processes take part
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = _put(jax.random.key_data(leaf), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    whole = np.asarray(leaf)
    whole = whole.astype(jax.dtypes.canonicalize_dtype(whole.dtype), copy=False)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index]
    )
