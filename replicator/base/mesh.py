"""Build the mesh of replicas, name its shardings, and put whole values under them.

Nothing else builds meshes, or places a value that each process holds whole on devices
of several processes.

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
      num_replicas: Number of replicas, on the first devices; `None` takes all.
      devices: Devices to choose from; JAX's own list by default, those of one process
        side by side.

    Returns:
      A mesh whose only axis is `replica`.

    Raises:
      ArgumentError: There are not that many devices, or none of this process's is used,
        or `devices` is not a list of devices.

    >>> replica_mesh(2).axis_names
    ('replica',)
    """
    if devices is None:
        devices = sorted(jax_devices(), key=lambda device: device.process_index)
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


def jax_devices() -> list[Device]:
    """Return all devices of JAX, whose start may fail.

    >>> jax_devices() == jax.devices()
    True

    Raises:
      ArgumentError: `JAX_PLATFORMS` names devices that are not there.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as failure:
        wanted = getattr(jax.config, "jax_platforms", None)
        why = str(failure).partition("\n")[0].partition(" (")[0] or "JAX has none"
        raise ArgumentError(
            f"`JAX_PLATFORMS` must name devices that are there, got {wanted!r}: {why}. "
            "Install what they need (`replicator doctor` names it), or unset it."
        ) from None


def partition_mesh(sizes: Mapping[str, int], devices: Sequence[Device]) -> Mesh:
    """Arrange devices under several axes, the last one over devices side by side.

    Args:
      sizes: Size of each axis; their product is the number of devices used.
      devices: Devices to choose from; the first ones are used.

    >>> dict(partition_mesh({"data": 2, "model": 4}, jax.devices()).shape)
    {'data': 2, 'model': 4}
    """
    found = list(devices)[: math.prod(sizes.values())]
    grid = np.asarray(found, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes))


def listed_devices(devices: Any) -> list[Device]:
    """Return the devices of an argument as a list.

    >>> listed_devices(3)
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `devices` must be a list of JAX's devices, got ...

    Raises:
      ArgumentError: It is not a list of devices, is empty, or names one twice.
    """
    found = list(devices) if isinstance(devices, Iterable) else []
    if not found or not all(hasattr(each, "process_index") for each in found):
        count = devices if isinstance(devices, int) and devices > 0 else 1
        those = repr(devices) if isinstance(devices, str) else ""
        few = "" if those else f"[:{count}]"
        raise ArgumentError(
            f"`devices` must be a list of JAX's devices, got {devices!r}. Pass those "
            f"that you mean: `jax.devices({those}){few}`."
        )
    if twice := next((each for n, each in enumerate(found) if each in found[:n]), None):
        raise ArgumentError(
            f"`devices` must name each device once, got {twice} twice. Leave one out: "
            "a device runs one replica."
        )
    return found


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that is whole on every device.

    >>> replicated(replica_mesh(2)).spec
    P()
    """
    return NamedSharding(mesh, PartitionSpec())


def split_over_replicas(mesh: Mesh, *, axis: int = 0) -> NamedSharding:
    """Return the sharding of a value whose array axis `axis` is cut over replicas.

    >>> split_over_replicas(replica_mesh(2), axis=1).spec
    P(None, 'replica')
    """
    return NamedSharding(mesh, replica_spec(axis))


def replica_spec(axis: int = 0) -> PartitionSpec:
    """Return the spec that cuts array axis `axis` over replicas.

    >>> replica_spec()
    P('replica',)
    """
    return PartitionSpec(*[None] * axis, REPLICA_AXIS)


def spans_processes(mesh: Mesh) -> bool:
    """Return whether a mesh has devices of other processes.

    >>> spans_processes(replica_mesh(2))
    False
    """
    return len(mesh.local_devices) < mesh.size


def readable(tree: PyTree, mesh: Mesh) -> PyTree:
    """Gather, in a traced program, values of all replicas for each process to read."""
    if not spans_processes(mesh):
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Put values that every process holds whole on the devices of all processes.

    Unlike `jax.device_put` it does not communicate; all processes call it.

    Args:
      tree: NumPy or JAX arrays; those with the right sharding stay.
      shardings: A list with the sharding of each leaf; or a prefix of the tree.

    Returns:
      Global arrays.

    >>> put({"w": np.ones(4)}, replicated(replica_mesh(2)))["w"].is_fully_replicated
    True
    """
    leaves, structure = jax.tree.flatten(tree)
    # Leaf by leaf: nodes that check their children accept arrays only.
    shardings = leaf_shardings(tree, shardings)
    if all(sharding.is_fully_addressable for sharding in shardings):
        return structure.unflatten(jax.device_put(leaves, shardings))
    return structure.unflatten(map(_put, leaves, shardings))


def leaf_shardings(tree: PyTree, shardings: PyTree) -> list[Sharding]:
    """Return the sharding of each leaf, given a list of them or a prefix of the tree.

    >>> len(leaf_shardings({"a": 0, "b": 1}, replicated(replica_mesh(2))))
    2
    """
    count = jax.tree.structure(tree).num_leaves
    if isinstance(shardings, Sharding):
        return [shardings] * count
    if isinstance(shardings, list) and len(shardings) == count:
        return shardings
    return jax.tree.leaves(jax.tree.broadcast(shardings, tree))


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
