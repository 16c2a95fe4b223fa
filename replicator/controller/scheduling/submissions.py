"""Send runs of dataflows to islands.

A call puts one message into the inbox of each island that takes part, under one lock:
so a dataflow has its numbers on all of them at once, and no two of them see two
dataflows in different orders.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from replicator.controller.arguments import check_leaves
from replicator.controller.dataflow import Dataflow
from replicator.controller.future import Future, Pending
from replicator.controller.islands.protocol import Island, IslandMessage, Key
from replicator.controller.program import Look
from replicator.controller.runs import Runs
from replicator.errors import ArgumentError


class Submissions:
    """Messages of runs, numbered for each island.

    Attributes:
      islands: All islands, by name; set before the first run.
      report: What islands call when a value is computed, or cannot be.
    """

    def __init__(self) -> None:
        self.islands: Mapping[str, Island] = {}
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._runs = Runs()
        self._is_open = True
        self.report = self._runs.report

    def close(self) -> bool:
        """Take no more runs; return whether it was open."""
        with self._lock:  # no message comes after it
            was_open, self._is_open = self._is_open, False
        return was_open

    def submit(self, dataflow: Dataflow, leaves: Sequence[Any]) -> list[Future]:
        """Send each island its part of a run."""
        planned = dataflow.plan
        check_leaves(leaves, planned.donated)
        values = {
            number: leaves[at]
            for at, numbers in planned.puts.items()
            for number in numbers
        }
        futures = {number: leaves[at] for at, number in planned.inputs.items()}
        inputs: dict[int, Key] = {n: future._key for n, future in futures.items()}
        made = {held.number for held in planned.outputs} - futures.keys()
        pending = {number: Pending() for number in made}

        def submit(run: int) -> None:
            with self._lock:
                self.check_open()
                # Another thread may have donated them since they were looked at.
                for future in futures.values():
                    future._check()
                messages = {
                    name: IslandMessage(
                        number=self._numbers.get(name, 0),
                        run=run,
                        order_list=orders,
                        inputs=inputs,
                        values=values,
                    )
                    for name, orders in planned.order_lists.items()
                }
                try:
                    self._send(messages)
                except BaseException:
                    # Ctrl-C: islands that have theirs wait for those that have not.
                    self._send(messages)
                    raise
                for at in planned.donated:
                    leaves[at]._donated_to = dataflow.name

        taken = {number: future._pending for number, future in futures.items()}
        run = self._runs.start(planned.behind, pending, taken, submit)
        for held, aval in zip(planned.outputs, dataflow.result_shapes, strict=True):
            # A result that is an argument, or another result, is the same future.
            if held.number not in futures:
                futures[held.number] = Future(
                    island=self.islands[held.slice.island],
                    key=(run, held.number),
                    pending=pending[held.number],
                    on=held.slice,
                    layout=held.layout,
                    aval=aval,
                )
        return [futures[held.number] for held in planned.outputs]

    def look(self, leaf: Any, *, is_weak: bool) -> Look:
        """Return what a dataflow is traced for of a leaf; refuse futures of others."""
        if not isinstance(leaf, Future):
            is_weak = getattr(leaf, "weak_type", is_weak)
            return Look(tuple(leaf.shape), leaf.dtype, is_weak, None, None)
        if leaf._island is not self.islands.get(leaf.slice.island):
            raise ArgumentError(
                f"a future must be of the same `pw`, got one of another, on "
                f"{leaf.slice}. Pass its `result()`."
            )
        leaf._check()
        name, layout = leaf.slice.name, leaf._layout
        return Look(leaf.shape, leaf.dtype, leaf._is_weak, name, layout)

    def check_open(self) -> None:
        """Refuse calls after the end."""
        if not self._is_open:
            raise ArgumentError(
                "`pw` must be open, got one that was closed. Call it inside of its "
                "`with` statement."
            )

    def _send(self, messages: Mapping[str, IslandMessage]) -> None:
        for name, message in messages.items():
            self._numbers[name] = message.number + 1
            self.islands[name].submit(message)
