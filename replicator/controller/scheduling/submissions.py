"""Calls of dataflows, as runs for the scheduler."""

import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from replicator.base.host.clock import SystemClock
from replicator.base.out_of_memory import readable
from replicator.controller.arguments import check_leaves
from replicator.controller.dataflow import Dataflow
from replicator.controller.future import ClientRecord, Future, Pending
from replicator.controller.islands.protocol import Island, Key
from replicator.controller.program import Look
from replicator.controller.runs import Runs
from replicator.controller.scheduling.called_run import CalledRun
from replicator.controller.scheduling.events import (
    ClientJoined,
    ClientLeft,
    IslandJoined,
    IslandLost,
    QueuedRun,
    SliceClosed,
)
from replicator.controller.scheduling.planned import Plan
from replicator.controller.scheduling.scheduler import Scheduler
from replicator.controller.scheduling.timeline import OpTimes
from replicator.controller.slices import Slice
from replicator.errors import ArgumentError


class Submissions:
    """Clients, and the runs that they called.

    Attributes:
      times: When ops ran.
      report: What islands call when a value is computed, or cannot be.
    """

    def __init__(self) -> None:
        self.times = OpTimes(SystemClock())
        self._lock = threading.Lock()
        self._runs = Runs()
        self._scheduler = Scheduler(self._runs, self.times)
        self._clients: weakref.WeakValueDictionary[str, ClientRecord]
        self._clients = weakref.WeakValueDictionary()
        self._count = itertools.count()
        self._is_open = True
        self.report = self._scheduler.report

    def start(self, islands: Mapping[str, Island], *, is_fifo: bool) -> None:
        """Start to send runs to islands."""
        self._islands = islands
        self._scheduler.start(islands, is_fifo=is_fifo)

    def close(self) -> bool:
        """Take no more runs, send those that wait; return whether it was open."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._scheduler.close()
        return was_open

    def settle(self) -> None:
        """Wait until nothing refers to runs that are done."""
        self._scheduler.settle()

    def join(self, name: str, weight: float) -> ClientRecord:
        """Return a new client; it leaves when nothing refers to it, or its futures.

        Raises:
          ArgumentError: A client of that name is there.
        """
        with self._lock:
            self.check_open()
            if name in self._clients:
                raise ArgumentError(
                    f"`name` must be of no other client of this `pw`, got {name!r}. "
                    "Choose another, or close that client."
                )
            record = ClientRecord(next(self._count), name)
            self._clients[name] = record
        self._scheduler.put(ClientJoined(record.number, weight))
        left = ClientLeft(record.number)
        weakref.finalize(record, self._scheduler.put, left).atexit = False
        return record

    def leave(self, client: ClientRecord) -> None:
        """Free what a client holds, and cancel what has not started."""
        with self._lock:
            client.has_left = True
            if self._clients.get(client.name) is client:
                del self._clients[client.name]
        self._scheduler.put(ClientLeft(client.number))

    def give_back(self, given: Slice) -> None:
        """Free what lives on a slice."""
        self._scheduler.put(SliceClosed(given.name))

    def island_joined(self, name: str) -> None:
        """Take an island that more runs may be sent to."""
        self._scheduler.put(IslandJoined(name))

    def island_lost(self, name: str) -> None:
        """Take it that what lives on an island is gone."""
        self._scheduler.put(IslandLost(name))

    def submit(
        self, client: ClientRecord, dataflow: Dataflow, leaves: Sequence[Any]
    ) -> list[Future]:
        """Take a call of a dataflow; return its results."""
        planned = dataflow.plan
        check_leaves(leaves, planned.donated)
        _check_fits(dataflow.name, planned)
        futures = {number: leaves[at] for at, number in planned.inputs.items()}
        results = {number: Pending() for number in planned.results}
        called = CalledRun(
            dataflow=dataflow.name,
            client=client,
            plan=planned,
            keys={number: future._key for number, future in futures.items()},
            values={
                number: leaves[at]
                for at, numbers in planned.puts.items()
                for number in numbers
            },
            results=results,
            taken={number: future._pending for number, future in futures.items()},
        )
        donated = [leaves[at] for at in planned.donated]

        def submit(run: int) -> None:
            with self._lock:
                self.check_open()
                if client.has_left:
                    raise ArgumentError(
                        f"a client must be there to call `{dataflow.name}`, got "
                        f"`{client.name}`, which left. Call it inside of its `with` "
                        "statement."
                    )
                # Another thread may have donated them since they were looked at.
                for future in futures.values():
                    future._check_usable()
                queued = _queued(run, called, {future._key for future in donated})
                self._scheduler.submit(queued, called)
                for future in donated:
                    future._donated_to = dataflow.name

        run = self._runs.start(
            planned.behind, results, called.taken, submit, client.room
        )
        for value, aval in zip(planned.outputs, dataflow.result_shapes, strict=True):
            # A result that is an argument, or another result, is the same future.
            if value.number not in futures:
                futures[value.number] = Future(
                    island=self._islands[planned.homes[value.slice.name]],
                    key=(run, value.number),
                    drop=self._scheduler.drop,
                    client=client,
                    pending=results[value.number],
                    on=value.slice,
                    layout=value.layout,
                    aval=aval,
                )
        return [futures[value.number] for value in planned.outputs]

    def look(self, leaf: Any, *, is_weak: bool) -> Look:
        """Return what a dataflow is traced for of a leaf; refuse futures of others."""
        if not isinstance(leaf, Future):
            is_weak = getattr(leaf, "weak_type", is_weak)
            return Look(tuple(leaf.shape), leaf.dtype, is_weak, None, None)
        if leaf._island is not self._islands.get(leaf._island.name):
            raise ArgumentError(
                f"a future must be of the same `pw`, got one of another, on "
                f"{leaf.slice}. Pass its `result()`."
            )
        leaf._check_usable()
        name, layout = leaf.slice.name, leaf._layout
        return Look(leaf.shape, leaf.dtype, leaf._is_weak, name, layout)

    def check_open(self) -> None:
        """Refuse calls after the end."""
        if not self._is_open:
            raise ArgumentError(
                "`pw` must be open, got one that was closed. Call it inside of its "
                "`with` statement."
            )


def _check_fits(name: str, planned: Plan) -> None:
    """Refuse slices that were given back, and memory that can never be enough."""
    for each in planned.slices.values():
        each.check_open(f"`{name}`")
    for slice_, most in planned.most_bytes.items():
        on = planned.slices[slice_]
        taken = (planned.sizes[number] for number in planned.inputs.values())
        size = most + sum(size for where, size in taken if where == slice_)
        if size > on.memory_bytes:
            raise ArgumentError(
                f"`{name}` must fit `memory_bytes` of {on}, got {readable(size)} of "
                f"arguments and results on each device for "
                f"{readable(on.memory_bytes)}. Ask for more by `pw.slice`, or for "
                "less by one call."
            )


def _queued(number: int, called: CalledRun, donated: set[Key]) -> QueuedRun:
    planned = called.plan
    return QueuedRun(
        number=number,
        client=called.client.number,
        ops=planned.ops_of,
        takes=frozenset(called.keys.values()),
        donates=frozenset(donated),
        makes={(number, value): at for value, at in planned.results.items()},
        most_bytes=planned.most_bytes,
        limits=planned.limits,
    )
