"""Copy a state before the next step takes its memory: on its devices, or to the host.

A copy on the devices is dispatched behind the step that makes the state, so that the
loop waits for nothing; it needs room for the state once more. A copy to the host waits
for that step, and takes one leaf after the other.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal, TypeAlias

import jax
import numpy as np

from replicator.base.out_of_memory import is_out_of_memory
from replicator.base.types import PyTree
from replicator.errors import DeviceMemoryError

CopyPlace: TypeAlias = Literal["device", "host"]
COPY_PLACES = ("device", "host")


def copy_state(arrays: PyTree, *, place: CopyPlace) -> PyTree:
    """Return a copy of arrays that are each on one device.

    Args:
      arrays: Any pytree of them.
      place: `"device"` for one on the same devices, which is being made when this
        returns; `"host"` for NumPy arrays.

    Raises:
      DeviceMemoryError: The devices have no room for it.

    >>> copy_state([jnp.ones(2)], place="host")
    [array([1., 1.], dtype=float32)]
    """
    if place == "host":
        return jax.tree.map(np.array, arrays)
    # One dispatch for all. A copy to the same device needs no compilation.
    where = jax.tree.map(lambda array: array.sharding, arrays)
    with lack_of_memory_explained():
        return jax.device_put(arrays, where, may_alias=False)


@contextlib.contextmanager
def lack_of_memory_explained() -> Iterator[None]:
    """Raise a `DeviceMemoryError` where XLA has no room for a copy of a state.

    A lack may show only where the copy is read.

    >>> with lack_of_memory_explained():
    ...     pass
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as failure:
        if not is_out_of_memory(failure):
            raise
        raise DeviceMemoryError(
            "`copy` must be a place with room for a copy of the state, got devices "
            f"without it: {str(failure).splitlines()[0]} Pass "
            '`checkpoint_copy="host"` to the run, or `CheckpointStore(copy="host")`.'
        ) from failure
