"""Layout of arrays with a leading device axis: one row of that axis on each device.

The convention of `pmap`: an array that a process holds has one row for each device of
its own. Underneath is one global array over the devices of all processes; programs of
several processes take and return the part of it that is in this process.

Meshes are built here, and not in `mesh`, because their one axis has the user's name.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.base.mesh import spans_processes
from replicator.base.types import Device

WHOLE = -1
"""In a list of axes: the value has no device axis, every device gets all of it."""


@functools.lru_cache(maxsize=256)
def axis_mesh(axis_name: Any, devices: tuple[Device, ...]) -> Mesh:
    """Return a mesh whose only axis is `axis_name`."""
    return Mesh(np.asarray(devices, dtype=object), (axis_name,))


@functools.lru_cache(maxsize=256)
def several_processes(mesh: Mesh) -> bool:
    """Return whether devices of other processes are in a mesh; called at each call."""
    return spans_processes(mesh)


@functools.lru_cache(maxsize=1024)
def axis_sharding(mesh: Mesh, axis: int) -> NamedSharding:
    """Return the sharding of an array whose axis `axis` is cut; `WHOLE` for none."""
    return NamedSharding(mesh, axis_spec(mesh, axis))


def axis_spec(mesh: Mesh, axis: int) -> PartitionSpec:
    """Return the spec that cuts array axis `axis` over the mesh; `WHOLE` for none."""
    if axis == WHOLE:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, mesh.axis_names[0])


def put_rows(leaves: Sequence[Any], axes: Sequence[int], mesh: Mesh) -> list[Any]:
    """Put the arrays of this process under the mesh, if they are not yet.

    Args:
      leaves: Arrays, NumPy arrays or numbers; tracers are left alone.
      axes: Device axis of each leaf; `WHOLE` for none.
      mesh: The devices, of all processes.

    Returns:
      Global arrays.
    """
    several = several_processes(mesh)
    here = mesh.local_mesh if several else mesh
    placed = []
    for leaf, axis in zip(leaves, axes, strict=True):
        if not _lies_under(leaf, axis, here, mesh):
            leaf = jax.device_put(leaf, axis_sharding(here, axis))
        if several and not isinstance(leaf, Tracer):
            spec = axis_spec(mesh, axis)
            leaf = multihost_utils.host_local_array_to_global_array(leaf, mesh, spec)
        placed.append(leaf)
    return placed


def local_rows(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the part of a global array that is on the devices of this process."""
    assert isinstance(array.sharding, NamedSharding)  # it came out of our program
    return multihost_utils.global_array_to_host_local_array(
        array, mesh, array.sharding.spec
    )


def first_row(leaf: Any) -> Any:
    """Return row 0 of a leading device axis, without a program over all devices.

    `leaf[0]` is one: it gathers, and takes a hundred times as long.
    """
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return leaf[0]
    if leaf.sharding.num_devices == 1 or leaf.is_fully_replicated:
        return leaf.addressable_data(0)[0]
    rows = leaf.addressable_data(0)
    return rows.squeeze(0) if rows.shape[0] == 1 else rows[0]


def _lies_under(leaf: Any, axis: int, here: Mesh, mesh: Mesh) -> bool:
    if isinstance(leaf, Tracer):
        return True
    if not isinstance(leaf, jax.Array):
        return False
    sharding, target = leaf.sharding, axis_sharding(here, axis)
    if sharding == target:
        return True
    if not leaf.is_fully_addressable:  # a global array, passed on as it is
        target = axis_sharding(mesh, axis)
    return sharding.is_equivalent_to(target, leaf.ndim)
