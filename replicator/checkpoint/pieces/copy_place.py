"""Place of the copy of a state that a save makes before the next step.

A copy on the devices is dispatched behind the step that makes the state, so that the
loop waits for nothing; it needs room for the state once more. A copy to the host waits
for that step, and takes one leaf after the other.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal, TypeAlias

import jax

from replicator.base.out_of_memory import is_out_of_memory
from replicator.errors import DeviceMemoryError

CopyPlace: TypeAlias = Literal["device", "host"]
COPY_PLACES = ("device", "host")


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
