"""Where arrays with a leading device axis lie: one row of that axis on each device.

The convention of `pmap`: an array that a process holds has one row for each device of
its own. Underneath is one global array over the devices of all processes; what programs
of several processes are handed, and hand back, is the part of it that is here.

Meshes are built here, and not in `mesh`, because their one axis bears the user's name.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
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
    """Tell whether devices of other processes are in a mesh; asked at each call."""
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
    """Put the arrays of this process under the mesh, where they do not lie so yet.

    Args:
      leaves: Arrays, NumPy arrays or numbers; tracers are left alone.
      axes: For each leaf, which axis is the devices'; `WHOLE` for none.
      mesh: The devices, of all processes.

    Returns:
      Global arrays.
    """
    here = mesh.local_mesh if several_processes(mesh) else mesh
    targets = [axis_sharding(here, axis) for axis in axes]
    wrong = [
        i
        for i, leaf in enumerate(leaves)
        if not _lies_under(leaf, targets[i], mesh, axes[i])
    ]
    placed = list(leaves)
    if wrong:
        moved = jax.device_put([leaves[i] for i in wrong], [targets[i] for i in wrong])
        for i, leaf in zip(wrong, moved, strict=True):
            placed[i] = leaf
    if here is mesh:
        return placed
    return [_global(leaf, axis, mesh) for leaf, axis in zip(placed, axes, strict=True)]


def local_rows(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the part of a global array that is on the devices of this process."""
    if not several_processes(mesh) or isinstance(array, Tracer):
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = local_rows(jax.random.key_data(array), mesh)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    assert isinstance(array.sharding, NamedSharding)  # it came out of our program
    spec = array.sharding.spec
    shape = list(array.shape)
    for axis, name in enumerate(spec):
        if name is not None:
            shape[axis] = shape[axis] * len(mesh.local_devices) // mesh.size
    return jax.make_array_from_single_device_arrays(
        tuple(shape),
        NamedSharding(mesh.local_mesh, spec),
        [shard.data for shard in array.addressable_shards],
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


def _lies_under(leaf: Any, target: NamedSharding, mesh: Mesh, axis: int) -> bool:
    if isinstance(leaf, Tracer):
        return True
    if not isinstance(leaf, jax.Array):
        return False
    sharding = leaf.sharding
    if sharding == target:
        return True
    if not leaf.is_fully_addressable:  # a global array, handed on as it is
        return sharding.is_equivalent_to(axis_sharding(mesh, axis), leaf.ndim)
    return sharding.is_equivalent_to(target, leaf.ndim)


def _global(leaf: Any, axis: int, mesh: Mesh) -> Any:
    if isinstance(leaf, Tracer) or not leaf.is_fully_addressable:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _global(jax.random.key_data(leaf), axis, mesh)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    shape = list(leaf.shape)
    if axis != WHOLE:
        shape[axis] = shape[axis] * mesh.size // len(mesh.local_devices)
    return jax.make_array_from_single_device_arrays(
        tuple(shape),
        axis_sharding(mesh, axis),
        [shard.data for shard in leaf.addressable_shards],
    )
