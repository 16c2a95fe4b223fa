"""An island of several processes that `jax.distributed` has joined.

Each process has a member here, an island of its own to the controller: all members get
the same messages in the same order, without the orders of slices of which they have no
device. What one process alone cannot know is put together here: a value is computed
when all processes that have a part of it say so, and read from the parts of all. The
processes must do the same, or they wait for each other; so an island is lost with the
first that is lost, or that fails an op that the others do not. If some have got
what another island sent, before that was lost, and some not, all fail the op
(`waiting/arrivals.py`), and the island stays.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from replicator.controller.islands.protocol import (
    Call,
    Computation,
    Drop,
    IslandDevice,
    IslandMessage,
    IslandReport,
    Key,
    Order,
    OrderList,
)
from replicator.controller.islands.remote import RemoteIsland
from replicator.controller.islands.wire import joined_parts
from replicator.controller.layouts import SliceLayout
from replicator.errors import ArgumentError, IslandLostError, OpFailedError, RpcError

Lost = Callable[[str, BaseException], None]


@dataclasses.dataclass
class _Tally:
    """How many processes have a part of a value, and what they reported of it."""

    processes: int = 0
    computed: int = 0
    failed: int = 0
    failed_here: bool = False  # and not on an island that it depends on


class GroupIsland:
    """Island of several processes.

    Args:
      name: Its name.
      devices: Devices of all its processes.
      make_member: Makes the island of one process: given its number, whom it reports
        to, and who is told that it is lost.
      report: Called when a value is computed, or cannot be.
      lost: Called with its name and an error when it is lost.
    """

    is_here = False

    def __init__(
        self,
        name: str,
        devices: Sequence[IslandDevice],
        make_member: Callable[[int, IslandReport, Lost], RemoteIsland],
        *,
        report: IslandReport,
        lost: Lost,
    ) -> None:
        self.name = name
        self.devices = devices
        self._report = report
        self._tell_lost = lost
        self._parts: weakref.WeakKeyDictionary[OrderList, Mapping[int, OrderList]]
        self._parts = weakref.WeakKeyDictionary()
        # By value that is kept, the processes that have a part of it.
        self._holders: dict[Key, list[int]] = {}
        self._open: dict[Key, _Tally] = {}
        self._is_lost = False
        self._lock = threading.Lock()  # guards these two; reports are made under it
        self._members: dict[int, RemoteIsland] = {}
        for number in sorted({device.process for device in devices}):
            self._members[number] = make_member(
                number, self._hear, functools.partial(self._lose, number)
            )

    @property
    def why_lost(self) -> str:
        """How it was lost; "" while it is there."""
        whys = [member.why_lost for member in self._members.values()]
        return next(filter(None, whys), "")

    def load(self, computation: Computation) -> Sequence[SliceLayout]:
        """Compile a computation in all its processes; return its outputs' layouts."""
        numbers = sorted({self.devices[at].process for at in computation.places})
        if computation.is_host:
            raise ArgumentError(
                f"op `{computation.name}` of `pw.host` must run on an island of one "
                f"process, got one on {self.name} at {computation.line}. Make its "
                "slice with `island=` of another."
            )
        members = [self._members[number] for number in numbers]
        program = members[0].program(computation)
        return _together(members, lambda at: at.load_program(computation, program))[0]

    def submit(self, message: IslandMessage) -> None:
        """Take the message with the next number, and return at once."""
        parts = self._parts_of(message.order_list)
        for number, part in parts.items():
            for value in part.kept:
                self._holders.setdefault((message.run, value), []).append(number)
        for order in message.order_list.orders:  # they forget what an op donates
            for value in order.values if isinstance(order, Drop) else ():
                self._holders.pop(message.inputs.get(value, (-1, -1)), None)
        with self._lock:
            for value in (n for part in parts.values() for n in part.outputs):
                self._open.setdefault((message.run, value), _Tally()).processes += 1
        for number, part in parts.items():
            values = {n: v for n, v in message.values.items() if n in part.outputs}
            self._members[number].submit(
                dataclasses.replace(message, order_list=part, values=values)
            )

    def ask(self, keys: Sequence[Key]) -> None:
        """Nothing is prepared: `read` asks each process for its parts."""

    def read(self, keys: Sequence[Key]) -> list[jax.Array]:
        """Return values that were reported."""
        # All parts of a value or none, though an op may be given it meanwhile.
        holders = {key: self._holders.get(key, ()) for key in keys}
        asked = {
            number: [key for key in keys if number in holders[key]]
            for number in self._members
        }
        found = _together(
            asked, lambda number: self._members[number].read(asked[number])
        )
        parts: dict[Key, list[Any]] = {}
        for number, arrays in zip(asked, found, strict=True):
            for key, array in zip(asked[number], arrays, strict=True):
                parts.setdefault(key, []).append(array)
        return [joined_parts(parts[key]) for key in keys]

    def drop(self, key: Key) -> None:
        """Forget a value after all messages so far; may be called in any thread."""
        for number in self._holders.pop(key, ()):
            self._members[number].drop(key)

    def lose(self, source: str, error: BaseException) -> None:
        """Fail what would be received of an island that was lost."""
        for member in self._members.values():
            member.lose(source, error)

    def meet(self, name: str, address: str) -> None:
        """Tell it of a process of an island that joined."""
        for member in self._members.values():
            member.meet(name, address)

    def close(self) -> None:
        """End after the messages so far; none of its processes ends before the others.

        The first of them has what joins all: it is the last.
        """
        _together(self._members.values(), RemoteIsland.leave)
        for member in reversed(self._members.values()):
            member.end()

    def kill(self) -> None:
        """End it at once: after Ctrl-C."""
        for member in reversed(self._members.values()):
            member.kill()

    def _parts_of(self, orders: OrderList) -> Mapping[int, OrderList]:
        """Return the orders of each process: those of slices that it has devices of."""
        if orders not in self._parts:
            self._parts[orders] = {
                number: OrderList(
                    orders=[each for each in orders.orders if self._has(number, each)]
                )
                for number in self._members
            }
        return self._parts[orders]

    def _has(self, number: int, order: Order) -> bool:
        if isinstance(order, Drop):
            return True
        on = order.computation if isinstance(order, Call) else order
        return any(self.devices[at].process == number for at in on.places)

    def _hear(
        self,
        run: int,
        values: Sequence[int],
        error: BaseException | None,
        age_s: float = 0.0,
        /,
    ) -> None:
        """Take the report of a process; report what all have, or one has not."""
        news, is_torn = [], False
        with self._lock:
            for value in values:
                tally = self._open.get((run, value))
                if tally is None:  # it was to be received, which only failures report
                    news += [value] if error else []
                    continue
                is_first = tally.failed == 0
                tally.failed += error is not None
                tally.computed += error is None
                if tally.failed + tally.computed == tally.processes:
                    del self._open[run, value]
                    news += [value] if tally.failed == 0 else []
                news += [value] if error and is_first else []
                tally.failed_here |= _island_of(error) == self.name
                is_torn |= tally.failed_here and tally.computed > 0
            if news:
                self._report(run, news, error, age_s)
            # A process that died is found by the others, whose collectives fail.
            is_own = _island_of(error) == self.name
            is_torn |= is_own and isinstance(error, IslandLostError)
            is_torn &= not self._is_lost
        if is_torn:
            # The others follow.
            next(iter(self._members.values())).give_up(
                RpcError("an op failed in some processes alone")
            )

    def _lose(self, number: int, name: str, error: BaseException) -> None:
        with self._lock:
            was_lost, self._is_lost = self._is_lost, True
        if not was_lost:
            for other, member in list(self._members.items()):
                if other != number:  # which waits for the end of this
                    member.give_up(RpcError("another of its processes was lost"))
            self._tell_lost(name, error)


def _island_of(error: BaseException | None) -> str:
    return error.island if isinstance(error, OpFailedError) else ""


def _together(each: Collection[Any], call: Callable[[Any], Any]) -> list[Any]:
    """Return what calls return, all at once: each may wait for the others."""
    pool = ThreadPoolExecutor(len(each))
    try:
        return list(pool.map(call, each))
    finally:  # after Ctrl-C nobody waits for them
        pool.shutdown(wait=False)
