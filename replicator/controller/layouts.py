"""Layouts of arrays on slices, and plans of moves between slices, as data.

A layout is a mesh of a slice's devices, by the names and sizes of its axes, and a
partition spec. Its boxes say which part of the array each device holds. Where every box
of the target lies on some device of the source, the move is shard to shard; otherwise
one side reshards: the source before, or the target after, whichever moves fewer bytes.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.base.types import Device

WHOLE = PartitionSpec()
"""The spec of an array that is whole on each device."""
_COPIES = "_copies"
Box = tuple[tuple[int, int], ...]
"""Begin and end of each dimension."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SliceLayout:
    """How an array lies on the devices of a slice.

    Attributes:
      axes: Name and size of each axis of the mesh; their product is the number of
        devices.
      spec: Axes that cut each dimension of the array.
    """

    axes: tuple[tuple[str, int], ...]
    spec: PartitionSpec = WHOLE

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    def sharding(self, devices: Sequence[Device]) -> NamedSharding:
        """Return it for the devices of a slice."""
        sizes = tuple(size for _, size in self.axes)
        grid = np.asarray(devices, dtype=object).reshape(sizes)
        return NamedSharding(
            Mesh(grid, tuple(name for name, _ in self.axes)), self.spec
        )

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """Return the part of an array of `shape` that each device holds.

        >>> SliceLayout(axes=(("x", 2),), spec=PartitionSpec("x")).boxes((4, 3))
        [((0, 2), (0, 3)), ((2, 4), (0, 3))]
        """
        cuts = [_names(entry) for entry in self.spec]
        cuts += [()] * (len(shape) - len(cuts))
        sizes = dict(self.axes)
        places = itertools.product(*(range(size) for size in sizes.values()))
        return [
            tuple(
                _part(length, [(place[name], sizes[name]) for name in names])
                for length, names in zip(shape, cuts, strict=True)
            )
            for place in (dict(zip(sizes, each, strict=True)) for each in places)
        ]

    def most_elements(self, shape: Sequence[int]) -> int:
        """Return how many elements of an array of `shape` a device holds at most.

        >>> SliceLayout(axes=(("x", 2),), spec=PartitionSpec("x")).most_elements((4, 3))
        6
        """
        return max(map(_size, self.boxes(shape)))


def layout_of(sharding: object, num_devices: int) -> SliceLayout | None:
    """Return the layout of a sharding of JAX; None if it has no mesh."""
    if isinstance(sharding, NamedSharding):
        return SliceLayout(axes=tuple(sharding.mesh.shape.items()), spec=sharding.spec)
    return SliceLayout(axes=(("devices", 1),)) if num_devices == 1 else None


def misfit(spec: PartitionSpec, axes: Mapping[str, int], shape: Sequence[int]) -> str:
    """Return why a spec does not fit an array, or "".

    >>> misfit(PartitionSpec("x"), {"x": 2}, (3,))
    'dimension 0 of size 3 does not divide by 2'
    """
    if len(spec) > len(shape):
        return f"it has {len(spec)} entries for {len(shape)} dimensions"
    for dimension, entry in enumerate(spec):
        names = _names(entry)
        if unknown := [name for name in names if name not in axes]:
            return f"the slice has no axis {unknown[0]!r}"
        parts = math.prod(axes[name] for name in names)
        if shape[dimension] % parts:
            size = shape[dimension]
            return f"dimension {dimension} of size {size} does not divide by {parts}"
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MovePlan:
    """How an array gets from one slice to another.

    Attributes:
      before: Layout on the source that it is resharded to first; None for as it is.
      sources: For each device of the target, the number of the source's device whose
        shard it takes.
      arrived: Layout in which it arrives on the target.
      after: Layout that it is resharded to there; None for as it arrived.
      size: Number of elements that move, over all devices.
    """

    before: SliceLayout | None
    sources: tuple[int, ...]
    arrived: SliceLayout
    after: SliceLayout | None
    size: int


def plan_move(
    shape: Sequence[int], source: SliceLayout, target: SliceLayout
) -> MovePlan:
    """Plan the move of an array from a slice to another.

    Args:
      shape: Of the whole array.
      source: Layout on the slice where it is.
      target: Layout on the slice where it is wanted.

    >>> one, two = (SliceLayout(axes=(("x", n),)) for n in (1, 2))
    >>> plan_move((4,), two, one).sources
    (0,)
    """
    return min(
        _plans(shape, source, target),
        key=lambda plan: (plan.size, (plan.before, plan.after).count(None) * -1),
    )


def _plans(
    shape: Sequence[int], source: SliceLayout, target: SliceLayout
) -> Iterator[MovePlan]:
    # On the way an array lies as the target wants it, as the source has it, or whole.
    ways = [target]
    if target.num_devices % source.num_devices == 0:
        ways.append(_repeated(source, target.num_devices // source.num_devices))
    ways.append(SliceLayout(axes=target.axes))
    for arrived in ways:
        for before in _befores(source, arrived):
            sources = _matched((before or source).boxes(shape), arrived.boxes(shape))
            if sources is None:
                continue
            is_there = arrived.boxes(shape) == target.boxes(shape)
            yield MovePlan(
                before=before,
                sources=sources,
                arrived=target if is_there else arrived,
                after=None if is_there else target,
                size=sum(map(_size, arrived.boxes(shape))),
            )
            break


def _befores(source: SliceLayout, arrived: SliceLayout) -> Iterator[SliceLayout | None]:
    yield None
    if source.num_devices % arrived.num_devices == 0:
        yield _repeated(arrived, source.num_devices // arrived.num_devices)
    if not any(arrived.spec):
        yield SliceLayout(axes=source.axes)


def _repeated(layout: SliceLayout, times: int) -> SliceLayout:
    """Return a layout on more devices, each box on `times` of them."""
    if times == 1:
        return layout
    return SliceLayout(axes=((_COPIES, times), *layout.axes), spec=layout.spec)


def _matched(held: Sequence[Box], wanted: Sequence[Box]) -> tuple[int, ...] | None:
    """Return who holds each box that is wanted; None if nobody holds one."""
    holders: dict[Box, list[int]] = {}
    for number, box in enumerate(held):
        holders.setdefault(box, []).append(number)
    if not all(box in holders for box in wanted):
        return None
    # Devices that hold the same box take turns.
    return tuple(holders[box][n % len(holders[box])] for n, box in enumerate(wanted))


def unknown_axes(spec: PartitionSpec, axes: Mapping[str, int]) -> list[str]:
    """Return the axes that a spec names and a mesh does not have.

    >>> unknown_axes(PartitionSpec("x", ("y", "z")), {"y": 2})
    ['x', 'z']
    """
    return [name for entry in spec for name in _names(entry) if name not in axes]


def _names(entry: object) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def _part(length: int, places: Sequence[tuple[int, int]]) -> tuple[int, int]:
    index, parts = 0, 1
    for place, size in places:
        index, parts = index * size + place, parts * size
    return index * length // parts, (index + 1) * length // parts


def _size(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)
