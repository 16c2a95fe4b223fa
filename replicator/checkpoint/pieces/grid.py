"""Choose the shards of an array, and the chunks inside them; join overlapping reads.

A shard is one file or object, written at once by one process. Its chunks are what can
be read alone. Chunks are cut on every dimension about equally often, as another layout
may cut any: with a chunk of whole rows, a process that needs a column would read all.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]

_CHUNK_BYTES = 1 << 21
_LEAST_CHUNK_BYTES = 1 << 18
_CHUNKS = 64  # of an array that is too small for chunks of `_CHUNK_BYTES`
_FEW = 8  # a shorter dimension is cut last: strategies seldom cut it
_UNEVEN = 128  # of so many elements the end of an uneven cut is below 2 %


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A region of an array.

    Attributes:
      start: First index on each axis.
      shape: Number of indices on each axis.
    """

    start: Shape
    shape: Shape

    @classmethod
    def between(cls, start: Iterable[int], stop: Iterable[int]) -> "Box":
        """Return the region from `start` up to `stop`, which is not in it.

        >>> Box.between((4, 4), (6, 2)).shape
        (2, 0)
        """
        start = tuple(start)
        shape = tuple(max(0, end - at) for at, end in zip(start, stop, strict=True))
        return cls(start=start, shape=shape)

    @property
    def stop(self) -> Shape:
        """First index behind the region, on each axis."""
        return tuple(at + size for at, size in zip(self.start, self.shape, strict=True))

    def common(self, other: "Box") -> "Box":
        """Return the region that is in both.

        >>> Box(start=(4,), shape=(4,)).common(Box(start=(2,), shape=(3,)))
        Box(start=(4,), shape=(1,))
        """
        start = map(max, self.start, other.start)
        return Box.between(start, map(min, self.stop, other.stop))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the place of this region in an array that holds only `outer`.

        >>> Box(start=(4,), shape=(2,)).within(Box(start=(3,), shape=(5,)))
        (slice(1, 3, None),)
        """
        return tuple(
            slice(at - first, at - first + size)
            for at, size, first in zip(self.start, self.shape, outer.start, strict=True)
        )

    def is_in(self, outer: "Box") -> bool:
        """Return whether this region lies in another.

        >>> Box(start=(4,), shape=(2,)).is_in(Box(start=(3,), shape=(3,)))
        True
        """
        return all(
            first <= at and end <= last
            for at, end, first, last in zip(
                self.start, self.stop, outer.start, outer.stop, strict=True
            )
        )


def whole_box(shape: Shape) -> Box:
    """Return the region that is all of an array.

    >>> whole_box((2, 3)).start
    (0, 0)
    """
    return Box(start=(0,) * len(shape), shape=shape)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The regular grids of an array's shards, and of the chunks inside a shard.

    Attributes:
      shard: Shape of a shard, a multiple of a chunk's.
      chunk: Shape of a chunk.
    """

    shard: Shape
    chunk: Shape


def box_at(index: tuple[slice, ...], shape: Shape, whole: Shape) -> Box:
    """Return the region of an index, without what lies behind `whole`.

    Args:
      index: A slice for each axis.
      shape: Shape of the array that it is an index of.
      whole: Its shape without padding.

    >>> box_at((slice(6, 8),), (8,), (7,))
    Box(start=(6,), shape=(1,))
    """
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    start = (min(at, n) for (at, _, _), n in zip(bounds, whole, strict=True))
    stop = (min(end, n) for (_, end, _), n in zip(bounds, whole, strict=True))
    return Box.between(start, stop)


def choose_grid(shape: Shape, piece: Shape, itemsize: int, *, shard_bytes: int) -> Grid:
    """Choose shards that none of the pieces shares with another.

    Args:
      shape: Shape of the array; no dimension is 0.
      piece: Shape of the pieces that devices hold, from index 0 on.
      itemsize: Bytes of an element.
      shard_bytes: Size that a shard may have.

    >>> choose_grid((4096, 1024), (1024, 1024), 4, shard_bytes=1 << 22)
    Grid(shard=(1024, 1024), chunk=(512, 128))
    """
    piece = tuple(map(min, piece, shape))
    total = math.prod(shape) * itemsize
    limit = min(max(total // _CHUNKS, _LEAST_CHUNK_BYTES), _CHUNK_BYTES, shard_bytes)
    chunk = _cut(shape, piece, limit / itemsize)
    return Grid(shard=_grow(shape, piece, chunk, shard_bytes / itemsize), chunk=chunk)


def cells(box: Box, cell: Shape) -> Iterator[tuple[Shape, Box]]:
    """Yield the cells of a grid that meet a region, as (index, common region).

    >>> [index for index, _ in cells(Box(start=(2, 0), shape=(4, 1)), (2, 2))]
    [(1, 0), (2, 0)]
    """
    ranges = [
        range(at // size, -(-(at + extent) // size))
        for at, extent, size in zip(box.start, box.shape, cell, strict=True)
    ]
    for index in itertools.product(*ranges):
        first = tuple(n * size for n, size in zip(index, cell, strict=True))
        yield index, box.common(Box(start=first, shape=cell))


def joined(boxes: Sequence[Box], chunk: Shape) -> list[Box]:
    """Join regions that share a chunk, so that each chunk is read once.

    >>> halves = [Box(start=(n,), shape=(2,)) for n in (0, 2, 8)]
    >>> [box.shape for box in joined(halves, (4,))]
    [(2,), (4,)]
    """
    boxes = list(boxes)
    for number, box in enumerate(boxes):
        for other in boxes[:number]:
            if _share(box, other, chunk):
                rest = [each for each in boxes if each not in (box, other)]
                return joined([*rest, _around(box, other)], chunk)
    return boxes


def _cut(shape: Shape, piece: Shape, limit: float) -> Shape:
    """Return a part of `piece` of at most `limit` elements, where that is possible."""
    block = list(piece)
    while math.prod(block) > limit:
        ways = [
            (size < _FEW, -(-whole // size), -size, axis, factor)
            for axis, (size, whole) in enumerate(zip(block, shape, strict=True))
            if (factor := _factor(size, is_free=piece[axis] == whole)) is not None
            and math.prod(block) / factor >= limit / _FEW
        ]
        if not ways:
            break
        *_, axis, factor = min(ways)
        block[axis] = -(-block[axis] // factor)
    return tuple(block)


def _factor(size: int, *, is_free: bool) -> int | None:
    """Return the number of parts that a dimension is cut into next."""
    if size == 1:
        return None
    if is_free and size >= _UNEVEN:
        return 2
    return next((n for n in range(2, math.isqrt(size) + 1) if size % n == 0), size)


def _grow(shape: Shape, piece: Shape, chunk: Shape, limit: float) -> Shape:
    """Return the largest block of whole chunks, inside a piece, of `limit` elements."""
    block = list(chunk)
    for axis in reversed(range(len(shape))):
        chunks = -(-piece[axis] // chunk[axis])
        room = limit / math.prod(block)
        if piece[axis] == shape[axis]:
            # Evenly, so that the last shard is not a small one.
            shards = -(-chunks // max(int(room), 1))
            block[axis] *= -(-chunks // shards)
        else:
            block[axis] *= max(
                n for n in range(1, chunks + 1) if chunks % n == 0 and n <= max(room, 1)
            )
    return tuple(block)


def _share(box: Box, other: Box, chunk: Shape) -> bool:
    return all(
        a // size < -(-(b + n) // size) and b // size < -(-(a + m) // size)
        for a, m, b, n, size in zip(
            box.start, box.shape, other.start, other.shape, chunk, strict=True
        )
    )


def _around(box: Box, other: Box) -> Box:
    start = map(min, box.start, other.start)
    return Box.between(start, map(max, box.stop, other.stop))
