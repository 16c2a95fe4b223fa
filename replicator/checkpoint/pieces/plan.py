"""Plan which process writes which region of which leaf, and where its bytes lie.

From shapes and shardings alone, so that all processes make the same plan and need not
ask each other. A large leaf is an array of its own, named by its number. Leaves under
64 kB lie one behind another in one array of bytes for each process that writes some:
thousands of them are not thousands of files.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from replicator.checkpoint.pieces.grid import Box, Grid, Shape, cells, choose_grid

_SMALL_BYTES = 1 << 16
_BUNDLE_BYTES = 1 << 20
_SHARDS = 64  # of a process: the few of them in memory are a small part of its state
_LEAST, _MOST = 1 << 21, 1 << 24  # bytes of a shard


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Places of a leaf's pieces.

    Attributes:
      shape: Shape of the leaf.
      dtype: Dtype that its bytes are stored as.
      itemsize: Bytes of an element.
      piece: Shape of the pieces, from index 0 on.
      holders: For the start of each piece, the processes that may write it.
    """

    shape: Shape
    dtype: str
    itemsize: int
    piece: Shape
    holders: Mapping[Shape, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """One zarr array.

    Attributes:
      name: Name of its folder.
      dtype: Its dtype.
      shape: Its shape.
      shard: Shape of its shards, each one file or object.
      chunk: Shape of the chunks in a shard.
    """

    name: str
    dtype: str
    shape: Shape
    shard: Shape
    chunk: Shape

    @classmethod
    def of(cls, name: str, dtype: str, shape: Shape, grid: Grid) -> Self:
        """Return an array with a grid.

        >>> StoredArray.of("0", "int8", (4,), Grid(shard=(4,), chunk=(2,))).shard
        (4,)
        """
        return cls(
            name=name, dtype=dtype, shape=shape, shard=grid.shard, chunk=grid.chunk
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SmallPiece:
    """A region of a small leaf, in an array of bytes.

    Attributes:
      array: Name of the array.
      offset: Bytes before the region.
      start: First index on each axis of the leaf.
      shape: Shape of the region.
    """

    array: str
    offset: int
    start: Shape
    shape: Shape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredLeaf:
    """Place of one leaf's bytes; one of size 0 has none.

    Attributes:
      dtype: Dtype that the bytes are stored as.
      shape: Stored shape; for random keys that of their data.
      array: Name of the array that is this leaf, or None.
      small: Regions in arrays of bytes.
    """

    dtype: str
    shape: Shape
    array: str | None = None
    small: tuple[SmallPiece, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A region of one leaf.

    Attributes:
      leaf: Number of the leaf.
      box: The region.
    """

    leaf: int
    box: Box


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Division of a save among processes.

    Attributes:
      leaves: Place of each leaf.
      arrays: All arrays.
      regions: By process, regions of large leaves that it writes.
      small: By process, regions of small leaves that it writes, in order of offsets.
    """

    leaves: tuple[StoredLeaf, ...]
    arrays: tuple[StoredArray, ...]
    regions: Mapping[int, tuple[Region, ...]]
    small: Mapping[int, tuple[Region, ...]]

    @property
    def writers(self) -> int:
        """Number of processes that write something."""
        return sum(bool(self.regions[each] or self.small[each]) for each in self.small)


def make_plan(leaves: Sequence[Spread], processes: Sequence[int]) -> Plan:
    """Divide the leaves among processes, evenly by bytes.

    >>> spread = Spread(shape=(8,), dtype="float32", itemsize=4, piece=(8,),
    ...                 holders={(0,): (0, 1)})
    >>> make_plan([spread], [0, 1]).leaves[0].small[0].array
    'small-0'

    Args:
      leaves: The leaves; each piece has a holder.
      processes: All processes that write.
    """
    total = sum(map(_nbytes, leaves))
    shard_bytes = min(max(total // (_SHARDS * len(processes)), _LEAST), _MOST)
    grids = [
        choose_grid(leaf.shape, leaf.piece, leaf.itemsize, shard_bytes=shard_bytes)
        if _nbytes(leaf) >= _SMALL_BYTES
        else None
        for leaf in leaves
    ]
    loads = dict.fromkeys(processes, 0)
    large, small = (
        [
            _Item(leaf=number, box=box, nbytes=size * leaf.itemsize, holders=holders)
            for number, (leaf, grid) in enumerate(zip(leaves, grids, strict=True))
            if (grid is None) == is_small
            for box, holders in _regions(leaf, grid)
            if (size := math.prod(box.shape))
        ]
        for is_small in (False, True)
    )
    regions = _deal(large, loads, bundle_bytes=0)
    packed = _deal(small, loads, bundle_bytes=_BUNDLE_BYTES)
    places, sizes = _pack(packed, leaves)
    arrays = [
        StoredArray.of(str(number), leaf.dtype, leaf.shape, grid)
        for number, (leaf, grid) in enumerate(zip(leaves, grids, strict=True))
        if grid is not None
    ]
    for name, size in sizes.items():
        grid = choose_grid((size,), (size,), 1, shard_bytes=shard_bytes)
        arrays.append(StoredArray.of(name, "uint8", (size,), grid))
    return Plan(
        leaves=tuple(
            StoredLeaf(
                dtype=leaf.dtype,
                shape=leaf.shape,
                array=None if grid is None else str(number),
                small=tuple(places.get(number, ())),
            )
            for number, (leaf, grid) in enumerate(zip(leaves, grids, strict=True))
        ),
        arrays=tuple(arrays),
        regions=regions,
        small=packed,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """A region that one of its holders is going to write."""

    leaf: int
    box: Box
    nbytes: int
    holders: tuple[int, ...]


def _regions(leaf: Spread, grid: Grid | None) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield pieces without padding; one of several processes is cut into shards."""
    for start, holders in sorted(leaf.holders.items()):
        shape = tuple(
            max(min(size, whole - at), 0)
            for at, size, whole in zip(start, leaf.piece, leaf.shape, strict=True)
        )
        piece = Box(start=start, shape=shape)
        if grid is None or len(holders) == 1:
            yield piece, holders
        else:
            yield from ((box, holders) for _, box in cells(piece, grid.shard))


def _deal(
    items: list[_Item], loads: dict[int, int], *, bundle_bytes: int
) -> dict[int, tuple[Region, ...]]:
    """Give each region to the least loaded of its holders; return them by process.

    Regions that together are smaller than `bundle_bytes` stay together.
    """
    dealt: dict[int, list[Region]] = {process: [] for process in loads}
    process, given = -1, 0
    for item in sorted(items, key=lambda it: (len(it.holders) > 1, -it.nbytes)):
        if process not in item.holders or given + item.nbytes > bundle_bytes:
            process, given = min(item.holders, key=lambda each: loads[each]), 0
        dealt[process].append(Region(leaf=item.leaf, box=item.box))
        loads[process] += item.nbytes
        given += item.nbytes
    return {
        process: tuple(sorted(own, key=lambda each: (each.leaf, each.box.start)))
        for process, own in dealt.items()
    }


def _pack(
    packed: Mapping[int, tuple[Region, ...]], leaves: Sequence[Spread]
) -> tuple[dict[int, list[SmallPiece]], dict[str, int]]:
    """Return the places of small leaves, and the sizes of the arrays of bytes."""
    places: dict[int, list[SmallPiece]] = {}
    sizes: dict[str, int] = {}
    for process, regions in packed.items():
        name = small_array(process)
        for region in regions:
            offset = sizes.setdefault(name, 0)
            place = SmallPiece(
                array=name,
                offset=offset,
                start=region.box.start,
                shape=region.box.shape,
            )
            places.setdefault(region.leaf, []).append(place)
            nbytes = math.prod(region.box.shape) * leaves[region.leaf].itemsize
            sizes[name] = offset + nbytes
    return places, sizes


def small_array(process: int) -> str:
    """Return the name of the array of a process's small leaves.

    >>> small_array(3)
    'small-3'
    """
    return f"small-{process}"


def _nbytes(leaf: Spread) -> int:
    return math.prod(leaf.shape) * leaf.itemsize
