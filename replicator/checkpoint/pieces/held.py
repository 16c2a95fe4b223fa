"""Find which processes hold the pieces of a leaf, and copy those that are here."""

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from replicator.checkpoint.pieces.arrays import stored_dtype
from replicator.checkpoint.pieces.copy_place import CopyPlace, lack_of_memory_explained
from replicator.checkpoint.pieces.grid import Box, Shape, box_at, whole_box
from replicator.checkpoint.pieces.plan import Region, Spread
from replicator.errors import ArgumentError

Array: TypeAlias = jax.Array | np.ndarray


def find_pieces(
    path: str, array: Array, shape: Shape, processes: Sequence[int]
) -> Spread:
    """Return where the pieces of a leaf are.

    A leaf on the host, or on devices of one process alone, is equal in all processes:
    the first one writes it.

    Args:
      path: Path of the leaf, for errors.
      array: The leaf, with padding behind it.
      shape: Its shape without padding.
      processes: Processes that write.

    Raises:
      ArgumentError: A piece is in none of the processes, or pieces are uneven.

    >>> find_pieces("w", np.ones(4), (4,), [0]).holders
    {(0,): (0,)}
    """
    if isinstance(array, np.ndarray):
        piece, found = shape, {whole_box(shape).start: {processes[0]}}
    else:
        piece, found = array.sharding.shard_shape(array.shape), {}
        alone = array.is_fully_addressable
        indices = array.sharding.devices_indices_map(array.shape)
        for device, index in indices.items():
            box = box_at(index, array.shape, shape)
            process = processes[0] if alone else device.process_index
            if 0 not in box.shape:
                found.setdefault(box.start, set()).add(process)
    holders = {
        start: tuple(sorted(holding.intersection(processes)))
        for start, holding in found.items()
        if 0 not in shape
    }
    for start, holding in holders.items():
        if not holding or any(at % n for at, n in zip(start, piece, strict=True)):
            raise ArgumentError(
                "`arrays` must be cut into equal pieces, each in a process that saves, "
                f"got one of `{path}` at {start} that is not. Save in all processes "
                "together, or put it under a `NamedSharding`."
            )
    return Spread(
        shape=shape,
        dtype=stored_dtype(np.dtype(array.dtype)),
        itemsize=array.dtype.itemsize,
        piece=piece,
        holders=holders,
    )


def copy_regions(
    arrays: Sequence[Array], regions: Sequence[Region], place: CopyPlace = "device"
) -> list[Array]:
    """Copy regions of leaves that are here; on devices by a dispatch, at once.

    Args:
      arrays: The leaves, with padding.
      regions: Regions of them, each in one piece.
      place: Place of the copies.

    Raises:
      DeviceMemoryError: The devices have no room for them.

    >>> region = Region(leaf=0, box=Box(start=(1,), shape=(2,)))
    >>> copy_regions([jnp.arange(4)], [region])
    [Array([1, 2], dtype=int32)]
    """
    found = [_find(arrays[region.leaf], region.box) for region in regions]
    if place == "host":  # one after the other: no second copy on a device
        return [np.array(fetch(piece, own.within(box))) for piece, box, own in found]
    with lack_of_memory_explained():
        return _copy_on_devices(found)


def _copy_on_devices(found: Sequence[tuple[Array, Box, Box]]) -> list[Array]:
    whole = {
        number: piece
        for number, (piece, box, own) in enumerate(found)
        if own == box and isinstance(piece, jax.Array)
    }
    # One dispatch for all. A copy to the same device needs no compilation.
    where = [piece.sharding for piece in whole.values()]
    copies = jax.device_put(list(whole.values()), where, may_alias=False)
    copied = dict(zip(whole, copies, strict=True))
    return [
        copied[number] if number in copied else _cut(piece, own.within(box), own.shape)
        for number, (piece, box, own) in enumerate(found)
    ]


def fetch(array: Array, place: tuple[slice, ...]) -> np.ndarray:
    """Return a part of a copy on the host; no more of it is fetched.

    >>> fetch(jnp.arange(4), (slice(1, 3),))
    array([1, 2], dtype=int32)
    """
    if isinstance(array, np.ndarray) or _is_on_host(array):
        return np.asarray(array)[place]  # a view
    shape = tuple(part.stop - part.start for part in place)
    return np.asarray(array if shape == array.shape else _cut(array, place, shape))


def _is_on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _find(array: Array, box: Box) -> tuple[Array, Box, Box]:
    """Return the piece that a region is in, the piece's place, and the region."""
    if isinstance(array, np.ndarray):
        return array, whole_box(array.shape), box
    for shard in array.addressable_shards:
        piece = box_at(shard.index, array.shape, array.shape)
        if box.is_in(piece):
            return shard.data, piece, box
    raise AssertionError("the plan gives a process only what it holds")


def _cut(piece: Array, place: tuple[slice, ...], shape: Shape) -> Array:
    if isinstance(piece, np.ndarray):
        return piece[place].copy()
    # Starts are an argument: one program for all regions of a shape.
    starts = np.array([part.start for part in place], np.int32)
    return _slice(piece, jax.device_put(starts, piece.sharding), shape)


@functools.partial(jax.jit, static_argnums=2)
def _slice(piece: jax.Array, starts: jax.Array, shape: Shape) -> jax.Array:
    return jax.lax.dynamic_slice(piece, list(starts), shape)
