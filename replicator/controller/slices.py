"""Slices: virtual devices, and where they are placed."""

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from replicator.base.out_of_memory import readable
from replicator.base.types import Device
from replicator.controller.islands.protocol import Island
from replicator.controller.layouts import WHOLE, SliceLayout
from replicator.errors import ArgumentError, check_count


class SliceDevices(tuple[Device, ...]):
    """The devices of a slice; who has them keeps it."""

    slice: "Slice"


@dataclasses.dataclass(kw_only=True, eq=False)
class Slice:
    """Devices of one island, on which functions run; from `pw.slice`.

    Attributes:
      name: Its name, "slice0".
      island: Name of the island; of another one, when that was lost.
      places: Numbers of its devices on the island.
      axes: Name and size of each axis of its mesh.
      memory_bytes: Memory of each device that was asked for.
      devices: Its devices, for `replicator.Replicator(devices=…)` or `pw.pmap`.
      closed: Set when it was given back.
      puts: What `put` made for it.
    """

    name: str
    island: str
    places: tuple[int, ...]
    axes: Mapping[str, int]
    memory_bytes: int
    devices: SliceDevices
    give_back: Callable[["Slice"], None] = dataclasses.field(
        default=lambda given: None, repr=False
    )
    closed: threading.Event = dataclasses.field(
        default_factory=threading.Event, repr=False
    )
    puts: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Give its devices and memory back; what lives on it is freed.

        A slice that nothing refers to, no function, future or dataflow, is given back
        as well.
        """
        if not self.closed.is_set():
            self.closed.set()
            self.give_back(self)

    def check_open(self, what: str) -> None:
        """Refuse what is of a slice that was given back.

        Args:
          what: "a future", or what else it is.
        """
        if self.closed.is_set():
            raise ArgumentError(
                f"{what} must be of a slice that is open, got {self}, which was "
                "closed. Make another by `pw.slice(n)`, and place its arrays again."
            )

    @property
    def tpus(self) -> tuple[Device, ...]:
        """The devices, by the name of Pathways' listing."""
        return self.devices

    @property
    def mesh(self) -> AbstractMesh:
        """Its mesh, without devices: for `jax.shard_map` in a function of the slice."""
        names, sizes = tuple(self.axes), tuple(self.axes.values())
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def layout(self, spec: PartitionSpec = WHOLE) -> SliceLayout:
        """Return a layout on its mesh."""
        return SliceLayout(axes=tuple(self.axes.items()), spec=spec)

    def __str__(self) -> str:
        return f"{self.name} ({len(self.places)} on {self.island})"


class VirtualDevices:
    """Devices that are asked for, as in Pathways' listing."""

    def __init__(self, make_slice: Callable[[int], Slice]) -> None:
        self._make_slice = make_slice

    def add_slice(self, tpu_devices: int) -> Slice:
        """Return a slice: `pw.slice(tpu_devices)`."""
        return self._make_slice(tpu_devices)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What `pw.slice` asks for: its arguments."""

    count: int
    axes: Mapping[str, int]
    kind: str | None
    island: str | None
    memory_bytes: int


def wish(
    n: int,
    axes: Mapping[str, int] | None,
    kind: str | None,
    island: str | None,
    memory_bytes: int,
) -> Wish:
    """Check the arguments of `pw.slice`.

    Raises:
      ArgumentError: The axes are not of `n` devices, or a number is no count.
    """
    check_count("n", n)
    check_count("memory_bytes", memory_bytes, "Leave it out.", least=0)
    axes = {"devices": n} if axes is None else axes
    if not isinstance(axes, Mapping):
        raise ArgumentError(
            f"`axes` must be a mapping of names to sizes, got {axes!r}. Pass "
            f"`{{'x': {n}}}`."
        )
    axes = dict(axes)
    for name, size in axes.items():
        check_count(f"axes[{name!r}]", size)
    if math.prod(axes.values()) != n:
        raise ArgumentError(
            f"`axes` must have {n} devices in all, got {axes}. Pass "
            f"{math.prod(axes.values())} for `n`."
        )
    return Wish(count=n, axes=axes, kind=kind, island=island, memory_bytes=memory_bytes)


def place(
    asked: Wish, islands: Sequence[Island], slices: Sequence[Slice]
) -> tuple[Island, tuple[int, ...]]:
    """Choose an island and devices of it: those that have the fewest slices.

    Args:
      asked: The wish.
      islands: All islands.
      slices: The slices that are placed.

    Raises:
      ArgumentError: No island can have it; the message says which wish fails, and what
        there is.
    """
    left = list(islands)
    for wanted, has in _wishes(asked, slices):
        fitting = [island for island in left if has(island)]
        if not fitting:
            free = "; ".join(_described(island, asked, slices) for island in left)
            raise ArgumentError(
                f"`pw.slice` must ask for {wanted}, got {_text(asked)}. There is "
                f"{free}."
            )
        left = fitting
    held = {each.name: _held(each, slices) for each in left}

    def order(island: Island) -> tuple[float, float]:
        counts = [len(held[island.name][at]) for at in _fitting(island, asked, slices)]
        return sum(sorted(counts)[: asked.count]), sum(counts) / len(island.devices)

    best = min(left, key=order)
    places = sorted(
        _fitting(best, asked, slices), key=lambda at: len(held[best.name][at])
    )
    return best, tuple(sorted(places[: asked.count]))


def _wishes(
    asked: Wish, slices: Sequence[Slice]
) -> list[tuple[str, Callable[[Island], bool]]]:
    n, kind, name = asked.count, asked.kind, asked.island
    return [
        ("an island by its name", lambda it: name in (None, it.name)),
        (
            "devices of a kind that is there",
            lambda it: any(_is_kind(each.kind, kind) for each in it.devices),
        ),
        (
            "at most the devices of one island",
            lambda it: sum(_is_kind(each.kind, kind) for each in it.devices) >= n,
        ),
        (
            "memory that is free",
            lambda it: len(_fitting(it, asked, slices)) >= n,
        ),
    ]


def _text(asked: Wish) -> str:
    wishes = {
        "": f"{asked.count} devices",
        "kind": asked.kind is not None and f"kind {asked.kind!r}",
        "island": asked.island is not None and f"island {asked.island!r}",
        "memory": asked.memory_bytes and f"{readable(asked.memory_bytes)} of each",
    }
    return ", ".join(text for text in wishes.values() if text)


def _is_kind(kind: str, wanted: str | None) -> bool:
    return wanted is None or kind.lower() == wanted.lower()


def _held(island: Island, slices: Sequence[Slice]) -> list[list[Slice]]:
    """Return the slices on each device of an island."""
    here = [each for each in slices if each.island == island.name]
    return [
        [each for each in here if at in each.places]
        for at in range(len(island.devices))
    ]


def _free_bytes(island: Island, slices: Sequence[Slice]) -> list[int]:
    return [
        device.memory_bytes - sum(each.memory_bytes for each in held)
        for device, held in zip(island.devices, _held(island, slices), strict=True)
    ]


def _fitting(island: Island, asked: Wish, slices: Sequence[Slice]) -> list[int]:
    return [
        at
        for at, free in enumerate(_free_bytes(island, slices))
        if _is_kind(island.devices[at].kind, asked.kind)
        and (not asked.memory_bytes or free >= asked.memory_bytes)
    ]


def _described(island: Island, asked: Wish, slices: Sequence[Slice]) -> str:
    kinds = ", ".join(sorted({each.kind for each in island.devices}))
    what = f"{island.name} with {len(island.devices)} devices of kind {kinds}"
    if not asked.memory_bytes:
        return what
    return f"{what}, {readable(min(_free_bytes(island, slices)))} free on each"
