"""What the controller asks of an island, and the messages between them: plain data.

The controller sends each island one message per run of a dataflow, under one sequence
of numbers per island. The island executes its messages strictly by number, and in each
message the orders from first to last, on one thread. It reports each order that has
results when these are computed, or why they are not.

Values are named by keys: the number of the run and of the value in its dataflow.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from replicator.base.types import Device, PyTree
from replicator.controller.layouts import SliceLayout
from replicator.errors import IslandLostError

Key = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IslandDevice:
    """A device, as the controller needs to know it.

    Attributes:
      kind: Its kind, as JAX names it.
      memory_bytes: Its memory.
      device: The device of JAX.
      process: Number of the process that has it, in the group of its island.
    """

    kind: str
    memory_bytes: int
    device: Device
    process: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Computation:
    """A function of arrays that an island compiles once, for a slice.

    Attributes:
      name: Its ops, for errors and profiles: "forward + backward".
      line: The user's line that called it.
      places: Numbers of the devices on the island.
      run: Takes arrays, returns arrays, and is traced; its meshes have no devices. With
        `is_eager` it is called as it is, and returns what to wait for and the arrays:
        the step that `rep.compile` returns.
      shapes: Shape and dtype of each input.
      inputs: Layout of each input.
      outputs: Layout of each output; None for what XLA chooses.
      donated: Positions of inputs whose memory it may take.
      is_eager: Whether `run` compiles by itself.
      is_host: Whether `run` is of the host: it takes and returns arrays of NumPy.
      traced_on: Devices of this process that its meshes have, if they have any.
    """

    name: str
    line: str
    places: tuple[int, ...]
    run: Callable[..., Sequence[Any]]
    shapes: Sequence[jax.ShapeDtypeStruct]
    inputs: Sequence[SliceLayout | None]
    outputs: Sequence[SliceLayout | None]
    donated: tuple[int, ...] = ()
    is_eager: bool = False
    is_host: bool = False
    traced_on: Sequence[Device] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Put:
    """Place a value of the host: value number `output`, in a layout."""

    output: int
    places: tuple[int, ...]
    layout: SliceLayout | None  # None: as it is, for a step that places it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Run a computation on values, by number."""

    computation: Computation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Hand shards of a value to an island, for a value there of number `output`.

    Attributes:
      input: The value.
      output: Number of the value there.
      places: Numbers of the devices of the value's slice.
      target: Name of the island.
      sources: For each device there, which of the slice's devices has its shard.
      targets: For each device there, the number of its process.
      is_kept: Whether the value outlives this run.
    """

    input: int
    output: int
    places: tuple[int, ...]
    target: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    is_kept: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Receive:
    """Take the shards that an island sent, one for each device of a slice.

    Attributes:
      source: Name of the island.
      output: The value.
      places: Numbers of the devices of its slice.
      senders: For each of them, the number of the process that sends its shard.
      layout: How the value lies on them.
      shape: Of the whole value.
    """

    source: str
    output: int
    places: tuple[int, ...]
    senders: tuple[int, ...]
    layout: SliceLayout
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Forget values that nothing uses after this."""

    values: tuple[int, ...]


Order = Put | Call | Send | Receive | Drop


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OrderList:
    """What an island does in each run of a dataflow, in this order."""

    orders: Sequence[Order]

    @functools.cached_property
    def outputs(self) -> dict[int, str]:
        """Values that are made here, and reported, with the names of their ops."""
        found: dict[int, str] = {}
        for order in self.orders:
            if isinstance(order, Call):
                found.update(dict.fromkeys(order.outputs, order.computation.name))
            elif isinstance(order, Put):
                found[order.output] = "put"
        return found

    @functools.cached_property
    def kept(self) -> frozenset[int]:
        """Values that are made here and not forgotten."""
        drops = [order for order in self.orders if isinstance(order, Drop)]
        return frozenset(self.outputs) - {n for drop in drops for n in drop.values}

    @functools.cached_property
    def passing(self) -> frozenset[int]:
        """First values of calls that the next call there takes, and nothing awaits."""
        awaited = set(self.kept)
        last: dict[tuple[int, ...], tuple[int, ...]] = {}
        taken: list[tuple[int, ...]] = []
        for order in self.orders:
            if isinstance(order, Send):
                awaited.add(order.input)
            elif isinstance(order, Put):
                last.pop(order.places, None)
            elif isinstance(order, Call) and order.computation.is_host:
                awaited.update(order.inputs)
            elif isinstance(order, Call):
                before = last.get(order.computation.places, ())
                if not set(before).isdisjoint(order.inputs):
                    taken.append(before)
                last[order.computation.places] = order.outputs
        return frozenset(each[0] for each in taken if awaited.isdisjoint(each))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IslandMessage:
    """What an island does for one run of a dataflow.

    Attributes:
      number: Its place in the island's sequence.
      run: Number of the run.
      order_list: What to do; the same object in each run.
      inputs: Keys of values of earlier runs, by their number in this dataflow.
      values: Arrays of the host to put, likewise.
    """

    number: int
    run: int
    order_list: OrderList
    inputs: Mapping[int, Key]
    values: Mapping[int, PyTree]


class IslandReport(Protocol):
    """What an island calls when values are computed, or cannot be."""

    def __call__(
        self,
        run: int,
        values: Sequence[int],
        error: BaseException | None,
        age_s: float = 0.0,
        /,
    ) -> None:
        """Take values of a run, and the error; it happened `age_s` ago."""


def process_name(island: str, process: int) -> str:
    """Return the name of a process of an island, for those that send to it.

    >>> process_name("island0", 0), process_name("island0", 1)
    ('island0', 'island0.1')
    """
    return f"{island}.{process}" if process else island


class ShardReceiver(Protocol):
    """A process of an island, to another one that sends to it."""

    def deliver(self, key: Key, sender: int | str, shards: Any) -> None:
        """Take shards that a process of another island sends, by its number.

        From another process of its own island, by name: whether that has its shards.
        """
        ...


class Island(Protocol):
    """A JAX runtime that executes messages; its makers are the other files here.

    Attributes:
      name: Its name.
      devices: Its devices.
      is_here: Whether it is in this process.
    """

    name: str
    devices: Sequence[IslandDevice]
    is_here: bool

    @property
    def why_lost(self) -> str:
        """How it was lost; "" while it is there."""
        ...

    def load(self, computation: Computation) -> Sequence[SliceLayout]:
        """Compile a computation; return the layouts of its outputs."""
        ...

    def submit(self, message: IslandMessage) -> None:
        """Take the message with the next number, and return at once."""
        ...

    def ask(self, keys: Sequence[Key]) -> None:
        """Have values that one call will read come with the report of the last."""
        ...

    def read(self, keys: Sequence[Key]) -> list[jax.Array]:
        """Return values that were reported."""
        ...

    def drop(self, key: Key) -> None:
        """Forget a value after all messages so far; may be called in any thread."""
        ...

    def lose(self, source: str, error: BaseException) -> None:
        """Fail what would be received of an island that was lost."""
        ...

    def close(self) -> None:
        """End after the messages so far."""
        ...

    def kill(self) -> None:
        """End at once what can be ended: after Ctrl-C."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandPool:
    """The islands of a controller, and what takes the place of one that is lost.

    Attributes:
      islands: All by name, those that were lost too; more may join.
      spares: Names of those that wait for the loss of another.
      another: Starts one more, in seconds; None where nothing can.
      stop: Ends what is being started.
      listen: Sets what is called with the name of each that is lost.
    """

    islands: Mapping[str, Island]
    spares: list[str] = dataclasses.field(default_factory=list)
    another: Callable[[], Island] | None = None
    stop: Callable[[], None] = lambda: None
    listen: Callable[[Callable[[str], None]], None] = lambda lost: None


def lost_with(island: Island) -> IslandLostError:
    """Return the error of a future that lived on an island that was lost."""
    error = IslandLostError(
        f"a future must be on an island that is there, got one that was lost with "
        f"{island.name}, {island.why_lost}. Compute it again, or from a copy that "
        "another island has by `pw.copy`."
    )
    error.island = island.name
    return error
