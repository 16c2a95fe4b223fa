"""What experiments took from `jaxline.utils`: rows of devices, keys, reading ahead."""

import enum
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import jax
import numpy as np

from replicator.base.types import Key, PyTree
from replicator.compat.jax_utils import prefetch_to_device, replicate
from replicator.compat.replicas import first_of_each
from replicator.errors import ArgumentError
from replicator.inputs.prefetch import Prefetcher

T = TypeVar("T")

tree_psum = jax.lax.psum


class DistributedRNGMode(enum.Enum):
    """In what random keys differ: over processes (hosts), over devices, or not."""

    UNIQUE_HOST_UNIQUE_DEVICE = "unique_host_unique_device"
    UNIQUE_HOST_SAME_DEVICE = "unique_host_same_device"
    SAME_HOST_UNIQUE_DEVICE = "same_host_unique_device"
    SAME_HOST_SAME_DEVICE = "same_host_same_device"

    @property
    def unique_host(self) -> bool:
        """Whether keys differ over processes."""
        return self.value.startswith("unique_host")

    @property
    def unique_device(self) -> bool:
        """Whether keys differ over devices."""
        return self.value.endswith("unique_device")


def get_first(xs: PyTree) -> PyTree:
    """Return the first device's row of each leaf, from that device."""
    return first_of_each(xs)


def bcast_local_devices(value: PyTree) -> PyTree:
    """Put a copy of each leaf on each device of this process."""
    return replicate(value)


def py_prefetch(
    iterable_function: Callable[[], Iterable[T]], buffer_size: int = 5
) -> Prefetcher[T]:
    """Read an iterable ahead, in a thread.

    Args:
      iterable_function: Returns it; called by the thread.
      buffer_size: Items kept ready.

    Returns:
      An iterator; what the iterable raises is raised there.
    """

    def read() -> Generator[T, None, None]:
        yield from iterable_function()

    return Prefetcher(read(), size=buffer_size)


def double_buffer(ds: Iterable[PyTree]) -> Prefetcher[PyTree]:
    """Keep two batches ready on the devices; leaves have a leading device axis."""
    return prefetch_to_device(ds, 2)


def double_buffer_on_gpu(ds: Iterable[PyTree]) -> Iterable[PyTree]:
    """Do so on GPUs; elsewhere return `ds`."""
    return double_buffer(ds) if jax.default_backend() == "gpu" else ds


def host_id_devices_for_rng(mode: str = "unique_host_unique_device") -> Any:
    """Return this process's number for each device, or None if `mode` needs none."""
    if not _mode(mode).unique_host:
        return None
    return np.full((jax.local_device_count(),), jax.process_index(), np.int32)


def specialize_rng_host_device(
    rng: Key,
    host_id: jax.Array | int | None,
    axis_name: str,
    mode: str = "unique_host_unique_device",
) -> Key:
    """Make a key this device's own, inside a mapped function.

    Args:
      rng: A key that all devices have.
      host_id: This process's number; None where `mode` does not need it.
      axis_name: The devices' axis.
      mode: In what keys are to differ.

    Raises:
      ArgumentError: `mode` is unknown, or lacks `host_id`.
    """
    wanted = _mode(mode)
    if wanted.unique_host:
        if host_id is None:
            raise ArgumentError(
                f"`host_id` must be given for {mode!r}, got None. Pass "
                "`host_id_devices_for_rng(mode)` to the mapped function."
            )
        rng = jax.random.fold_in(rng, host_id)
    if wanted.unique_device:
        rng = jax.random.fold_in(rng, jax.lax.axis_index(axis_name))
    return rng


def _mode(mode: str) -> DistributedRNGMode:
    try:
        return DistributedRNGMode(mode)
    except ValueError:
        known = [each.value for each in DistributedRNGMode]
        raise ArgumentError(
            f"`mode` must be one of {known}, got {mode!r}. Use the first."
        ) from None
