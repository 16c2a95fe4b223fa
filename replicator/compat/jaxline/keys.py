"""The random keys of steps, as jaxline makes them: one chain, and a key off it each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.types import Key
from replicator.compat.jaxline.device_rows import (
    bcast_local_devices,
    host_id_devices_for_rng,
    specialize_rng_host_device,
)
from replicator.compat.pmap import pmap
from replicator.errors import ArgumentError


@functools.cache
def next_keys(mode: str) -> Callable[[Any, Key], tuple[jax.Array, Key, Key]]:
    """Return what goes on by a step.

    Args:
      mode: In what the keys of a step differ.

    Returns:
      A function of the step before and the chain, both with a row for each device; it
      returns this step, this step's keys, and the chain after it.

    Raises:
      ArgumentError: `mode` is unknown.
    """
    host_id = host_id_devices_for_rng(mode)

    @functools.partial(pmap, axis_name="i")
    def advance(global_step: Any, chain: Key, host_id: Any) -> tuple[Any, Key, Key]:
        own, after = jax.random.split(chain)
        own = specialize_rng_host_device(own, host_id, axis_name="i", mode=mode)
        return global_step + 1, own, after

    return lambda global_step, chain: advance(global_step, chain, host_id)


def fixed_keys(rng: Key, mode: str) -> Key:
    """Return the keys of an evaluation, a row for each device."""
    make = functools.partial(specialize_rng_host_device, axis_name="i", mode=mode)
    rows = bcast_local_devices(rng)
    return pmap(make, axis_name="i")(rows, host_id_devices_for_rng(mode))


def require_equal_rows(rows: Key) -> None:
    """Refuse keys that differ over devices: one row is what is saved.

    Raises:
      ArgumentError: They do.
    """
    data = np.asarray(
        jax.random.key_data(rows)
        if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key)
        else rows
    )
    if not (data == data[:1]).all():
        raise ArgumentError(
            "`initialize_train_step_rng` must return the same key for each device, got "
            "different ones. Set `config.random_mode_train` instead."
        )
