"""Place arrays of the host, and of other islands, on devices of an island."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from replicator.base.mesh import put
from replicator.base.types import Device


def put_value(value: Any, sharding: Sharding | None = None) -> Any:
    """Return a value of the host in a sharding; as it is, for a step that places it."""
    if sharding is None:
        return value
    if not sharding.is_fully_addressable:
        return put(value, sharding)
    # An op may be given its memory: that of the caller's array must not be.
    may_alias = not isinstance(value, jax.Array)
    return jax.device_put(value, sharding, may_alias=may_alias)


def joined_shards(
    shards: Sequence[jax.Array],
    devices: Sequence[Device],
    shape: tuple[int, ...],
    sharding: Sharding,
) -> jax.Array:
    """Return an array of shards that another island's devices hold.

    Args:
      shards: A shard for each device of this process.
      devices: These devices.
      shape: Shape of the array.
      sharding: How it lies on them, and on those of other processes.
    """
    # To a `Device` of another client JAX copies by way of the host, and waits.
    places = [SingleDeviceSharding(device) for device in devices]
    # Without an alias: the op that takes it may be given its memory.
    moved = jax.device_put(shards, places, may_alias=False)
    return jax.make_array_from_single_device_arrays(shape, sharding, moved)
