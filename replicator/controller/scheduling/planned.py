"""Plans of dataflows: orders, results, and what they cost in ops and memory."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from replicator.controller.islands.protocol import (
    Call,
    Drop,
    OrderList,
    Put,
    Receive,
    Send,
)
from replicator.controller.layouts import SliceLayout
from replicator.controller.orders import Step, by_island
from replicator.controller.scheduling.events import PlacedResult
from replicator.controller.slices import Slice

Sizes = Mapping[int, tuple[str, int]]
"""By number of a value, its slice, and its bytes on each device of it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedOp:
    """A computation, or an array of the host that is placed.

    Attributes:
      name: Its name, for people.
      island: Where it runs.
      places: Numbers of its devices there.
      inputs: Values that it takes, by their numbers where they were made.
      is_host: Whether it is a function of the host.
    """

    name: str
    island: str
    places: tuple[int, ...]
    inputs: tuple[int, ...]
    is_host: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedValue:
    """Where a value is: its number in the dataflow, its slice and layout."""

    number: int
    slice: Slice
    layout: SliceLayout


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What islands do for a dataflow.

    Attributes:
      steps: Orders of all islands, in their order.
      inputs: By the position of an input that an earlier dataflow made, its number.
      puts: By the position of an input of the host, the numbers of its copies.
      outputs: The results.
      donated: Positions of inputs whose memory an op takes.
      behind: By number of a value, the numbers of results that depend on it.
      slices: Slices that it uses, by name.
      homes: The island of each, when this was planned.
      sizes: Slice of each value, and its bytes on each device.
      moved_bytes: Bytes that go from slice to slice.
    """

    steps: Sequence[Step]
    inputs: Mapping[int, int]
    puts: Mapping[int, Sequence[int]]
    outputs: Sequence[PlannedValue]
    donated: frozenset[int]
    behind: Mapping[int, frozenset[int]]
    slices: Mapping[str, Slice]
    homes: Mapping[str, str]
    sizes: Sizes
    moved_bytes: int

    @property
    def is_current(self) -> bool:
        """Whether no slice has moved since."""
        return all(self.slices[name].island == at for name, at in self.homes.items())

    @functools.cached_property
    def by_island(self) -> dict[str, OrderList]:
        """Orders of each island that takes part."""
        return by_island(self.steps)

    @functools.cached_property
    def ops(self) -> dict[int, PlannedOp]:
        """Its ops, each by the number of its first result."""
        return _planned_ops(self.steps)

    @functools.cached_property
    def ops_of(self) -> dict[str, int]:
        """Number of its ops on each island."""
        return collections.Counter(op.island for op in self.ops.values())

    @functools.cached_property
    def results(self) -> dict[int, PlacedResult]:
        """Where each result is that it makes; bytes of slices that keep memory."""
        numbers = {each.number for each in self.outputs} - set(self.inputs.values())
        placed = {}
        for number in numbers:
            slice_, size = self.sizes[number]
            placed[number] = PlacedResult(
                island=self.homes[slice_],
                slice=slice_,
                size_bytes=size if slice_ in self.most_bytes else 0,
            )
        return placed

    @functools.cached_property
    def most_bytes(self) -> dict[str, int]:
        """By slice that keeps memory, how much more lives there at the most."""
        most = _most_bytes(self.steps, self.sizes)
        return {
            name: most.get(name, 0)
            for name, slice_ in self.slices.items()
            if slice_.memory_bytes
        }

    @functools.cached_property
    def limits(self) -> dict[str, int]:
        """By slice that keeps memory, how much that is."""
        return {name: self.slices[name].memory_bytes for name in self.most_bytes}


def _planned_ops(steps: Sequence[Step]) -> dict[int, PlannedOp]:
    """Return the ops of a plan, each by the number of its first result."""
    made_as: dict[int, int] = {}
    ops: dict[int, PlannedOp] = {}
    for step in steps:
        order = step.order
        if isinstance(order, Send):
            made_as[order.output] = made_as.get(order.input, order.input)
        elif isinstance(order, Put):
            ops[order.output] = PlannedOp(
                name="put", island=step.island, places=order.places, inputs=()
            )
        elif isinstance(order, Call) and order.outputs:
            computation = order.computation
            ops[order.outputs[0]] = PlannedOp(
                name=computation.name,
                island=step.island,
                places=computation.places,
                inputs=tuple(made_as.get(each, each) for each in order.inputs),
                is_host=computation.is_host,
            )
    return ops


def _most_bytes(steps: Sequence[Step], sizes: Sizes) -> dict[str, int]:
    """Return how many bytes more than before live on each slice, at the most.

    Args:
      steps: Orders, with those that drop values.
      sizes: Of all values.
    """
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    freed: set[int] = set()

    def add(number: int, sign: int) -> None:
        name, size = sizes.get(number, ("", 0))
        now[name] = now.get(name, 0) + sign * size
        most[name] = max(most.get(name, 0), now[name])

    def free(number: int) -> None:
        if number not in freed:
            freed.add(number)
            add(number, -1)

    for step in steps:
        order = step.order
        if isinstance(order, Put | Receive):
            add(order.output, 1)
        elif isinstance(order, Call):
            for at in order.computation.donated:
                free(order.inputs[at])
            for number in order.outputs:
                add(number, 1)
        elif isinstance(order, Drop):
            for number in order.values:
                free(number)
    return most
