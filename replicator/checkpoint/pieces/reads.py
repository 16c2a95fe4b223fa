"""Read leaves ahead, and of each only the regions that devices here need, each once."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from replicator.base.padded import pad_to
from replicator.checkpoint.pieces.grid import Box, Shape, box_at, joined, whole_box
from replicator.checkpoint.pieces.stored_state import StoredState

_AHEAD_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A read that has not begun.

    Attributes:
      nbytes: Bytes that it holds on the host.
      begin: Begins to read; returns a function that waits for the leaf.
    """

    nbytes: int
    begin: Callable[[], Callable[[], Any]]


def read_all(reads: Iterable[Read]) -> list[Any]:
    """Return the leaves that reads give; a few of them run at a time.

    >>> read_all([Read(nbytes=8, begin=lambda: lambda: 5)])
    [5]
    """
    leaves: list[Any] = []
    running: collections.deque[tuple[int, Callable[[], Any]]] = collections.deque()
    held_bytes = 0
    for read in reads:
        while running and held_bytes + read.nbytes > _AHEAD_BYTES:
            nbytes, wait = running.popleft()
            leaves.append(wait())
            held_bytes -= nbytes
        running.append((read.nbytes, read.begin()))
        held_bytes += read.nbytes
    return leaves + [wait() for _, wait in running]


def whole_leaf(
    state: StoredState, leaf: int, place: Callable[[np.ndarray], Any] = np.asarray
) -> Read:
    """Return the read of a whole leaf.

    Args:
      state: The checkpoint's arrays.
      leaf: Number of the leaf.
      place: Turns the array on the host into the leaf.
    """
    shape = state.shape(leaf)

    def begin() -> Callable[[], Any]:
        wait = state.read_nowait(leaf, whole_box(shape))
        return lambda: place(wait())

    return Read(nbytes=math.prod(shape) * state.dtype(leaf).itemsize, begin=begin)


def sharded_leaf(
    state: StoredState, leaf: int, *, shape: Shape, sharding: Sharding
) -> Read:
    """Return the read of a leaf under a sharding, without what other processes hold.

    Args:
      state: The checkpoint's arrays.
      leaf: Number of the leaf.
      shape: Shape to restore: the saved one, or with padding behind it.
      sharding: Sharding of that shape.
    """
    boxes = {
        device: box_at(index or (), shape, state.shape(leaf))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    needed = [box for box in dict.fromkeys(boxes.values()) if 0 not in box.shape]
    blocks = joined(needed, state.chunk(leaf)) if needed else []
    piece = sharding.shard_shape(shape)

    def begin() -> Callable[[], jax.Array]:
        waits = [(block, state.read_nowait(leaf, block)) for block in blocks]

        def place() -> jax.Array:
            read = [(block, wait()) for block, wait in waits]
            pieces = {box: _piece(box, read, piece) for box in needed}
            padding = np.zeros(piece, state.dtype(leaf))
            arrays = jax.device_put(
                [pieces.get(box, padding) for box in boxes.values()],
                [
                    SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                    for device in boxes
                ],
            )
            return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

        return place

    size = sum(math.prod(block.shape) for block in blocks)
    return Read(nbytes=size * state.dtype(leaf).itemsize, begin=begin)


def _piece(box: Box, read: list[tuple[Box, np.ndarray]], shape: Shape) -> np.ndarray:
    """Return a region out of the block that it was read in, padded to `shape`."""
    array = next(
        block[box.within(around)] for around, block in read if box.is_in(around)
    )
    return array if array.shape == shape else pad_to(array, shape)
