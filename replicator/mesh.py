"""Build the mesh of replicas and name its shardings; nothing else builds meshes.

A replicating strategy has one axis, `replica`, of Auto type: `jax.make_mesh` would
build an Explicit one, over which `shard_map` refuses plain NumPy arguments.
Partitioning strategies will add the axes `shard` and `model` here, under an engine of
their own.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.errors import ArgumentError
from replicator.protocols import Device

REPLICA_AXIS = "replica"


def replica_mesh(
    num_replicas: int | None = None, *, devices: Sequence[Device] | None = None
) -> Mesh:
    """Arrange devices as replicas, one device each.

    Args:
      num_replicas: How many; the first so many devices are used. `None` takes all.
      devices: Devices to choose from; JAX's own list by default.

    Returns:
      A mesh whose only axis is `replica`.

    Raises:
      ArgumentError: There are not that many devices.
    """
    found = list(jax.devices() if devices is None else devices)
    wanted = len(found) if num_replicas is None else num_replicas
    if not 1 <= wanted <= len(found):
        raise ArgumentError(
            f"`num_replicas` must be between 1 and the {len(found)} devices that JAX "
            f"sees, got {num_replicas}. For a try on one machine call "
            f"`replicator.fake_devices({max(wanted, 1)})` before anything else."
        )
    return Mesh(np.asarray(found[:wanted], dtype=object), (REPLICA_AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_over_replicas(mesh: Mesh, *, axis: int = 0) -> NamedSharding:
    """Return the sharding of a value whose array axis `axis` is cut over replicas."""
    return NamedSharding(mesh, replica_spec(axis))


def replica_spec(axis: int = 0) -> PartitionSpec:
    """Return the spec that cuts array axis `axis` over replicas."""
    return PartitionSpec(*[None] * axis, REPLICA_AXIS)
