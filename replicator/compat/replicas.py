"""Put values on devices with a leading device axis, one row each, and take them back.

As `jax.device_put_replicated` and `jax.device_put_sharded`, which JAX 0.10 no longer
has. The result is one array over the devices; no device ever holds all rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from replicator.base.mesh import listed_devices
from replicator.base.types import Device, PyTree
from replicator.compat.layout import axis_mesh, axis_sharding
from replicator.errors import ArgumentError

ROWS = "rows"
"""Name of the axis of meshes that no collective names."""


def device_put_replicated(x: PyTree, devices: Sequence[Device]) -> PyTree:
    """Put a copy of each leaf on each device.

    Args:
      x: Any pytree of arrays or numbers.
      devices: Of this process.

    Returns:
      The tree with a leading axis of `len(devices)`.

    Raises:
      ArgumentError: There is no device.
    """
    listed_devices(devices)
    return jax.tree.map(lambda leaf: _join([leaf] * len(devices), devices), x)


def device_put_sharded(shards: Sequence[PyTree], devices: Sequence[Device]) -> PyTree:
    """Put the i-th tree on the i-th device.

    Args:
      shards: As many trees as devices; of one structure, with leaves of one shape.
      devices: Of this process.

    Returns:
      One tree with a leading axis of `len(devices)`.

    Raises:
      ArgumentError: There are not as many trees as devices, or they do not agree.
    """
    listed_devices(devices)
    if len(shards) != len(devices):
        raise ArgumentError(
            f"`shards` must be one for each device, got {len(shards)} for "
            f"{len(devices)} devices. Cut the batch into {len(devices)}."
        )
    try:
        return jax.tree.map(lambda *rows: _join(rows, devices), *shards)
    except ValueError as failure:
        raise ArgumentError(
            f"`shards` must agree in structure, shapes and dtypes, got {failure}. "
            "Cut the batch evenly."
        ) from failure


def _join(rows: Sequence[Any], devices: Sequence[Device]) -> jax.Array:
    sharding = axis_sharding(axis_mesh(ROWS, tuple(devices)), 0)
    if isinstance(rows[0], jax.Array):
        return _from_devices(rows, devices, sharding)
    whole = np.stack([np.asarray(row) for row in rows])
    return jax.device_put(whole, sharding)


def _from_devices(
    rows: Sequence[jax.Array], devices: Sequence[Device], sharding: Sharding
) -> jax.Array:
    """Copy from device to device, without the host."""
    alone = {id(row): jnp.expand_dims(_on_one_device(row), 0) for row in rows}
    pieces = jax.device_put([alone[id(row)] for row in rows], list(devices))
    shape = (len(devices), *np.shape(rows[0]))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _on_one_device(row: jax.Array) -> jax.Array:
    whole = row.is_fully_replicated and row.sharding.num_devices > 1
    return row.addressable_data(0) if whole else row
