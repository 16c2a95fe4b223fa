"""The thread that does what `decisions.py` decides.

Calls and islands' reports come from any thread, and dropped futures from the garbage
collector, so all are put into an inbox that takes no lock: a `SimpleQueue`. One thread
takes them out, and is the only one that sends to islands: so a dataflow has its numbers
on all of them at once, and no two of them see two dataflows in different orders.
"""

import queue
import threading
from collections.abc import Mapping, Sequence

from replicator.controller.islands.protocol import Island, IslandMessage, Key
from replicator.controller.runs import Runs
from replicator.controller.scheduling.called_run import CalledRun
from replicator.controller.scheduling.decisions import ScheduleState, decide
from replicator.controller.scheduling.events import (
    CancelReason,
    CancelRun,
    Closing,
    EndRun,
    ForgetValue,
    FutureDropped,
    OpEnded,
    QueuedRun,
    ScheduleAction,
    ScheduleEvent,
    StartRun,
)
from replicator.controller.scheduling.timeline import OpTimes
from replicator.errors import ArgumentError, IslandLostError

_REMEDIES: Mapping[CancelReason, str] = {
    "left": "a client or slice that left before. Keep it open until results are there",
    "memory": "slices full of values that wait, too. Ask for larger `memory_bytes`",
    "closed": "a `pw` that was closed while it waited for memory. Drop futures before",
}


class Scheduler:
    """Runs that are not done, and the thread that sends them.

    Args:
      runs: Knows what depends on what.
      times: Notes when ops ran.
    """

    def __init__(self, runs: Runs, times: OpTimes) -> None:
        self._runs = runs
        self._times = times
        self._inbox: queue.SimpleQueue[ScheduleEvent | threading.Event] = (
            queue.SimpleQueue()
        )
        self._called: dict[int, CalledRun] = {}
        self._numbers: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def start(self, islands: Mapping[str, Island], *, is_fifo: bool) -> None:
        """Start the thread."""
        self._islands = islands
        state = ScheduleState(islands, is_fifo=is_fifo)
        self._thread = threading.Thread(
            target=self._work, args=(state,), name="controller", daemon=True
        )
        self._thread.start()

    def put(self, event: ScheduleEvent) -> None:
        """Take an event; in any thread, also in one that the collector interrupts."""
        self._inbox.put(event)

    def drop(self, key: Key) -> None:
        """Take it that nobody refers to a result any more."""
        self._inbox.put(FutureDropped(key))

    def submit(self, run: QueuedRun, called: CalledRun) -> None:
        """Take a run; those of one client, and what runs take, come in their order."""
        self._called[run.number] = called
        self._inbox.put(run)

    def report(
        self,
        number: int,
        values: Sequence[int],
        error: BaseException | None,
        age_s: float = 0.0,
        /,
    ) -> None:
        """Take what an island computed, or why it did not; in any thread."""
        called = self._called.get(number)
        op = called.plan.ops.get(values[0]) if called and values else None
        if called is not None and op is not None:
            is_lost = isinstance(error, IslandLostError)
            device_s = None
            if not is_lost:
                device_s = self._times.ended(called, op, values, age_s)
            self._inbox.put(OpEnded(number, op.island, device_s))
        self._runs.report(number, values, error)

    def settle(self) -> None:
        """Wait until all is done that ops which ended and futures left to do."""
        settled = threading.Event()
        self._inbox.put(settled)
        while self._thread is not None and self._thread.is_alive():
            if settled.wait(0.1):
                return

    def close(self) -> None:
        """Send what waits, and end after it."""
        self._inbox.put(Closing())
        assert self._thread is not None
        self._thread.join()

    def _work(self, state: ScheduleState) -> None:
        while not (state.is_closing and state.is_done):
            event = self._inbox.get()
            if isinstance(event, threading.Event):
                event.set()
                continue
            for action in decide(state, event):
                self._do(action)

    def _do(self, action: ScheduleAction) -> None:
        match action:
            case StartRun():
                self._send(action.run)
            case ForgetValue():
                self._islands[action.island].drop(action.key)
            case EndRun():
                _give_room(self._called.pop(action.run))
            case CancelRun():
                lost = self._called.pop(action.run)
                _give_room(lost)
                error = ArgumentError(
                    f"dataflow `{lost.dataflow}` of client `{lost.client.name}` must "
                    f"be able to start, got {_REMEDIES[action.reason]}."
                )
                self._runs.report(action.run, list(lost.plan.behind), error)
                # No future of theirs is forgotten later, and they may be asked for.
                for value, at in lost.plan.results.items():
                    self._islands[at.island].drop((action.run, value))

    def _send(self, run: int) -> None:
        called = self._called[run]
        called.sent_s = self._times.now_s()
        for name, orders in called.plan.by_island.items():
            number = self._numbers.get(name, 0)
            self._numbers[name] = number + 1
            self._islands[name].submit(
                IslandMessage(
                    number=number,
                    run=run,
                    order_list=orders,
                    inputs=called.keys,
                    values=called.values,
                )
            )
        called.values = {}


def _give_room(called: CalledRun) -> None:
    if not called.results:  # others are done with the last of them
        called.client.room.put(None)
