"""Find which processes hold the pieces of a leaf, and copy those that are here."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding

from replicator.checkpoint.pieces.arrays import stored_dtype
from replicator.checkpoint.pieces.copy_place import CopyPlace, lack_of_memory_explained
from replicator.checkpoint.pieces.grid import Box, Shape, box_at, whole_box
from replicator.checkpoint.pieces.plan import Plan, Region, Spread, make_plan
from replicator.errors import ArgumentError

Array: TypeAlias = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Where a leaf is held.

    Attributes:
      path: Path of the leaf, for errors.
      shape: Its shape without padding.
      padded: Its shape with padding.
      dtype: Its dtype.
      sharding: Its sharding, or None for an array on the host.
    """

    path: str
    shape: Shape
    padded: Shape
    dtype: np.dtype
    sharding: Sharding | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A region that this process writes, and the piece here that it is in.

    Attributes:
      region: The region.
      number: Number of the piece among those of the leaf that are here.
      piece: Place of the piece.
    """

    region: Region
    number: int
    piece: Box


@functools.lru_cache(maxsize=8)
def plan_copies(
    leaves: tuple[Held, ...], processes: tuple[int, ...], process: int
) -> tuple[Plan, tuple[Source, ...]]:
    """Return the plan of a save, and what this process copies: large leaves first.

    A plan is kept for the next save, since it takes longer than to begin the copies.

    Args:
      leaves: The leaves.
      processes: Processes that write.
      process: This process.

    Raises:
      ArgumentError: A piece is in none of the processes, or pieces are uneven.

    >>> leaf = Held(path="w", shape=(4,), padded=(4,), dtype=np.dtype("int8"),
    ...             sharding=None)
    >>> plan_copies((leaf,), (0,), 0)[1][0].piece
    Box(start=(0,), shape=(4,))
    """
    plan = make_plan([_spread(leaf, processes) for leaf in leaves], processes)
    regions = (*plan.regions[process], *plan.small[process])
    return plan, tuple(_source(leaves[each.leaf], each) for each in regions)


def copy_regions(
    arrays: Sequence[Array], sources: Sequence[Source], place: CopyPlace = "device"
) -> list[Array]:
    """Copy regions of leaves that are here; on devices by a dispatch, at once.

    Args:
      arrays: The leaves, with padding.
      sources: Regions of them.
      place: Place of the copies.

    Raises:
      DeviceMemoryError: The devices have no room for them.

    >>> source = Source(region=Region(leaf=0, box=Box(start=(1,), shape=(2,))),
    ...                 number=0, piece=Box(start=(0,), shape=(4,)))
    >>> copy_regions([jnp.arange(4)], [source])
    [Array([1, 2], dtype=int32)]
    """
    pieces = [_piece(arrays[source.region.leaf], source.number) for source in sources]
    places = [source.region.box.within(source.piece) for source in sources]
    if place == "host":  # one after the other: no second copy on a device
        return [np.array(fetch(*each)) for each in zip(pieces, places, strict=True)]
    whole = {
        number: piece
        for number, (piece, source) in enumerate(zip(pieces, sources, strict=True))
        if isinstance(piece, jax.Array) and source.region.box == source.piece
    }
    with lack_of_memory_explained():
        # One dispatch for all. A copy to the same device needs no compilation.
        where = [piece.sharding for piece in whole.values()]
        copies = jax.device_put(list(whole.values()), where, may_alias=False)
        copied = dict(zip(whole, copies, strict=True))
        return [
            copied[number] if number in copied else _cut(piece, at)
            for number, (piece, at) in enumerate(zip(pieces, places, strict=True))
        ]


def fetch(array: Array, place: tuple[slice, ...]) -> np.ndarray:
    """Return a part of a copy on the host; no more of it is fetched.

    >>> fetch(jnp.arange(4), (slice(1, 3),))
    array([1, 2], dtype=int32)
    """
    if isinstance(array, np.ndarray) or _is_on_host(array):
        return np.asarray(array)[place]  # a view
    is_whole = _extents(place) == array.shape
    return np.asarray(array if is_whole else _cut(array, place))


def _is_on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _spread(leaf: Held, processes: tuple[int, ...]) -> Spread:
    """Return where the pieces of a leaf are.

    A leaf on the host, or on devices of one process alone, is equal in all processes:
    the first one writes it.
    """
    holders: dict[Shape, set[int]] = {}
    piece = leaf.shape
    if leaf.sharding is None:
        holders[whole_box(leaf.shape).start] = {processes[0]}
    else:
        piece = leaf.sharding.shard_shape(leaf.padded)
        alone = leaf.sharding.is_fully_addressable
        indices = leaf.sharding.devices_indices_map(leaf.padded)
        for device, index in indices.items():
            box = box_at(index or (), leaf.padded, leaf.shape)
            process = processes[0] if alone else device.process_index
            if 0 not in box.shape:
                holders.setdefault(box.start, set()).add(process)
    for start, holding in holders.items():
        holding.intersection_update(processes)
        if not holding or any(n and at % n for at, n in zip(start, piece, strict=True)):
            raise ArgumentError(
                "`arrays` must be cut into equal pieces, each in a process that saves, "
                f"got one of `{leaf.path}` at {start} that is not. Save in all "
                "processes together, or put it under a `NamedSharding`."
            )
    return Spread(
        shape=leaf.shape,
        dtype=stored_dtype(leaf.dtype),
        itemsize=leaf.dtype.itemsize,
        piece=piece,
        holders={start: tuple(sorted(holding)) for start, holding in holders.items()},
    )


def _source(leaf: Held, region: Region) -> Source:
    if leaf.sharding is None:
        return Source(region=region, number=0, piece=whole_box(leaf.shape))
    indices = leaf.sharding.addressable_devices_indices_map(leaf.padded)
    pieces = [box_at(at or (), leaf.padded, leaf.padded) for at in indices.values()]
    number = next(n for n, piece in enumerate(pieces) if region.box.is_in(piece))
    return Source(region=region, number=number, piece=pieces[number])


def _piece(array: Array, number: int) -> Array:
    return array if isinstance(array, np.ndarray) else array.addressable_data(number)


def _cut(piece: Array, place: tuple[slice, ...]) -> Array:
    if isinstance(piece, np.ndarray):
        return piece[place].copy()
    # Starts are an argument: one program for all regions of a shape.
    starts = np.array([part.start for part in place], np.int32)
    return _slice(piece, jax.device_put(starts, piece.sharding), _extents(place))


def _extents(place: tuple[slice, ...]) -> Shape:
    return tuple(part.stop - part.start for part in place)


@functools.partial(jax.jit, static_argnums=2)
def _slice(piece: jax.Array, starts: jax.Array, shape: Shape) -> jax.Array:
    return jax.lax.dynamic_slice(piece, list(starts), shape)
