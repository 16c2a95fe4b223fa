"""Decide which runs start: a state machine, without threads and clocks.

Runs wait in the queues of their clients. At most 16 ops of an island are in flight, so
that there is something to decide: whenever there is room, the client starts that has
had the least time of devices for its weight (start-time fair queueing: Goyal, Vin,
Cheng, SIGCOMM 1996), or whose call was first. A run starts on all of its islands at
once. It waits

- for the runs that make what it takes, and for those that take what it donates;
- for room on its islands: then nothing else starts there before it; but what takes
  results that the next run donates starts without, so that none waits for its reader;
- for memory, where a slice keeps `memory_bytes`: what it makes there at the most must
  fit beside what lives there. Others may start before it, as they may free memory.

All that a run needs was submitted before it, so none waits for ever, except for memory
of futures that the program keeps.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Iterator

from replicator.controller.islands.protocol import Key
from replicator.controller.scheduling.events import (
    CancelReason,
    CancelRun,
    ClientJoined,
    ClientLeft,
    Closing,
    EndRun,
    ForgetValue,
    FutureDropped,
    IslandJoined,
    IslandLost,
    OpEnded,
    PlacedResult,
    QueuedRun,
    ScheduleAction,
    ScheduleEvent,
    SliceClosed,
    StartRun,
)
from replicator.engine.run_ahead import MOST_ON_CPU


@dataclasses.dataclass(kw_only=True, slots=True)
class _Queue:
    """A client: its runs, and the time it had, for its weight."""

    weight: float
    used_s: float
    op_s: float = 0.0
    queued: dict[int, QueuedRun] = dataclasses.field(default_factory=dict)
    started: int = 0
    has_left: bool = False


@dataclasses.dataclass(kw_only=True, slots=True)
class _Held:
    """A result that lives, or will."""

    client: int
    placed: PlacedResult
    is_sent: bool = False
    is_made: bool = False
    has_future: bool = True
    is_forgotten: bool = False
    queued: int = 0
    started: int = 0


@dataclasses.dataclass(kw_only=True, slots=True)
class _Started:
    run: QueuedRun
    left: int
    estimated_s: float


class ScheduleState:
    """Clients with their runs, and what is in flight and lives; `decide` changes it.

    Args:
      islands: Names of the islands.
      is_fifo: Whether the first call starts first, and weights count for nothing.
    """

    def __init__(self, islands: Iterable[str], *, is_fifo: bool = False) -> None:
        self.in_flight = dict.fromkeys(islands, 0)
        self.is_fifo = is_fifo
        self.is_closing = False
        self.clients: dict[int, _Queue] = {}
        self.started: dict[int, _Started] = {}
        self.lost: set[str] = set()
        self.values: dict[Key, _Held] = {}
        self.held_bytes: dict[str, int] = {}
        self.now_s = self.op_s = 0.0

    @property
    def is_done(self) -> bool:
        """Whether nothing is in flight or waits."""
        return not self.started and not any(c.queued for c in self.clients.values())


def decide(state: ScheduleState, event: ScheduleEvent) -> list[ScheduleAction]:
    """Take an event into the state; return what to do, in this order.

    >>> state = ScheduleState(["island0"])
    >>> decide(state, ClientJoined(0, 1.0))
    []
    >>> decide(state, QueuedRun(number=5, client=0, ops={"island0": 1}))
    [StartRun(run=5)]
    """
    actions: list[ScheduleAction] = []
    match event:
        case QueuedRun():
            actions += _queue(state, event)
        case OpEnded():
            actions += _op_ended(state, event)
        case FutureDropped():
            actions += _drop(state, [event.key])
        case ClientJoined():
            state.clients[event.client] = _Queue(
                weight=event.weight, used_s=state.now_s
            )
        case ClientLeft():
            actions += _leave(state, event.client)
        case SliceClosed():
            held = state.values.items()
            on_it = [key for key, v in held if v.placed.slice == event.slice]
            actions += _drop(state, on_it)
        case IslandJoined():
            state.in_flight[event.island] = 0
        case IslandLost():
            _lose(state, event.island)
        case Closing():
            state.is_closing = True
    while True:
        while (run := _next(state)) is not None:
            actions += _start(state, run)
        if not (stalled := _stalled(state)):
            return actions
        actions += stalled


def _queue(state: ScheduleState, run: QueuedRun) -> list[ScheduleAction]:
    client = state.clients.get(run.client)
    taken = [state.values.get(key) for key in run.takes]
    gone = any(held is None or not held.has_future for held in taken)
    if client is None or client.has_left or gone:
        return [CancelRun(run.number, "left")]
    if not client.queued and not client.started:  # what it did not use is gone
        client.used_s = max(client.used_s, state.now_s)
    client.queued[run.number] = run
    for held in taken:
        assert held is not None
        held.queued += 1
    for key, placed in run.makes.items():
        state.values[key] = _Held(client=run.client, placed=placed)
    return []


def _next(state: ScheduleState) -> QueuedRun | None:
    """Return the run that starts next, if one can."""
    taken = {name for name, n in state.in_flight.items() if n >= MOST_ON_CPU}
    if len(taken) == len(state.in_flight):
        return None
    for run in _in_order(state):
        if not _is_ready(state, run):
            if taken.isdisjoint(run.ops) and (other := _held_up_by(state, run)):
                return other
            client = state.clients[run.client]
            client.used_s = max(client.used_s, state.now_s)
        elif taken.isdisjoint(run.ops):
            return run
        else:
            taken.update(run.ops)
            if len(taken) == len(state.in_flight):
                return None
    return None


def _in_order(state: ScheduleState) -> Iterator[QueuedRun]:
    clients = state.clients.values()
    if state.is_fifo:
        queues = (client.queued.values() for client in clients)
        yield from heapq.merge(*queues, key=lambda run: run.number)
    else:
        for client in sorted(clients, key=lambda client: client.used_s):
            yield from client.queued.values()


def _is_ready(state: ScheduleState, run: QueuedRun) -> bool:
    return (
        all(state.values[key].is_sent for key in run.takes)
        and all(state.values[key].queued == 1 for key in run.donates)
        and all(
            state.held_bytes.get(name, 0) + size <= run.limits[name]
            for name, size in run.most_bytes.items()
        )
    )


def _held_up_by(state: ScheduleState, run: QueuedRun) -> QueuedRun | None:
    """Return a run that takes what another donates, and only waits for room.

    It starts without: a learner does not wait for who copies its weights.
    """
    shared = {key for key in run.donates if state.values[key].queued > 1}
    others = (
        other
        for client in state.clients.values()
        for other in client.queued.values()
        if shared and other is not run and not shared.isdisjoint(other.takes)
    )
    return next((other for other in others if _is_ready(state, other)), None)


def _start(state: ScheduleState, run: QueuedRun) -> list[ScheduleAction]:
    client, ops = state.clients[run.client], sum(run.ops.values())
    del client.queued[run.number]
    state.now_s = max(state.now_s, client.used_s)
    estimated_s = client.op_s or state.op_s
    client.used_s += ops * estimated_s / client.weight
    client.started += 1
    state.started[run.number] = _Started(run=run, left=ops, estimated_s=estimated_s)
    for name, count in run.ops.items():
        state.in_flight[name] += count
    for name, size in run.most_bytes.items():
        _add_bytes(state, name, size)
    for key in run.takes:
        state.values[key].queued -= 1
        state.values[key].started += 1
    for key in run.makes:
        state.values[key].is_sent = True
    actions: list[ScheduleAction] = [StartRun(run.number)]
    for key in (*run.takes, *run.makes):
        actions += _settled(state, key)
    return actions if ops else [*actions, *_end(state, run)]


def _op_ended(state: ScheduleState, event: OpEnded) -> list[ScheduleAction]:
    started = state.started.get(event.run)
    if started is None:
        return []
    client = state.clients[started.run.client]
    state.in_flight[event.island] -= 1
    client.used_s += ((event.device_s or 0.0) - started.estimated_s) / client.weight
    if event.device_s is not None:
        known_s = client.op_s or event.device_s
        client.op_s = state.op_s = 0.9 * known_s + 0.1 * event.device_s
    started.left -= 1
    return [] if started.left else _end(state, started.run)


def _end(state: ScheduleState, run: QueuedRun) -> list[ScheduleAction]:
    del state.started[run.number]
    for name, size in run.most_bytes.items():
        _add_bytes(state, name, -size)
    for key, placed in run.makes.items():
        state.values[key].is_made = True
        _add_bytes(state, placed.slice, _bytes_of(state, placed))
    for key in run.takes:
        state.values[key].started -= 1
    for key in run.donates:  # its island forgot it, by the plan
        state.values[key].is_forgotten, state.values[key].has_future = True, False
    _end_of_client(state, run.client)
    actions: list[ScheduleAction] = [EndRun(run.number)]
    for key in (*run.takes, *run.makes):
        actions += _settled(state, key)
    return actions


def _end_of_client(state: ScheduleState, number: int) -> None:
    client = state.clients[number]
    client.started -= 1
    if client.has_left and not client.started:
        del state.clients[number]


def _drop(state: ScheduleState, keys: list[Key]) -> list[ScheduleAction]:
    actions: list[ScheduleAction] = []
    for key in keys:
        if key in state.values:
            state.values[key].has_future = False
            actions += _settled(state, key)
    return actions


def _settled(state: ScheduleState, key: Key) -> list[ScheduleAction]:
    """Free a result that nothing needs; runs that were sent have it from the island."""
    held = state.values[key]
    if held.has_future or held.queued or not held.is_sent:
        return []
    placed, was_forgotten = held.placed, held.is_forgotten
    held.is_forgotten = True
    if held.is_made and not held.started:
        del state.values[key]
        _add_bytes(state, placed.slice, -_bytes_of(state, placed))
    return [] if was_forgotten else [ForgetValue(placed.island, key)]


def _leave(state: ScheduleState, number: int) -> list[ScheduleAction]:
    client = state.clients.get(number)
    if client is None or client.has_left:  # it left, and then it was garbage
        return []
    client.has_left = True
    actions: list[ScheduleAction] = []
    for run in list(client.queued.values()):
        actions += _cancel(state, run, "left")
    actions += _drop(state, [k for k, v in state.values.items() if v.client == number])
    if not client.started:
        del state.clients[number]
    return actions


def _cancel(
    state: ScheduleState, run: QueuedRun, reason: CancelReason
) -> list[ScheduleAction]:
    """Forget a run that has not started, and those that take its results."""
    if state.clients[run.client].queued.pop(run.number, None) is None:
        return []
    actions: list[ScheduleAction] = [CancelRun(run.number, reason)]
    for client in list(state.clients.values()):
        for other in list(client.queued.values()):
            if not other.takes.isdisjoint(run.makes):
                actions += _cancel(state, other, reason)
    for key in run.makes:
        del state.values[key]
    for key in run.takes:
        state.values[key].queued -= 1
        actions += _settled(state, key)
    return actions


def _stalled(state: ScheduleState) -> list[ScheduleAction]:
    """Cancel the last run, if all wait for memory that nothing will free."""
    if state.started:
        return []
    queues = [client.queued for client in state.clients.values() if client.queued]
    if not queues:
        return []
    kept = any(
        held.has_future and held.is_made and _bytes_of(state, held.placed)
        for held in state.values.values()
    )
    if kept and not state.is_closing:  # the program may drop futures
        return []
    queue = max(queues, key=max)
    reason = "closed" if state.is_closing else "memory"
    return _cancel(state, queue[max(queue)], reason)


def _lose(state: ScheduleState, island: str) -> None:
    """Count what lives on an island no more; what is made there later, neither."""
    for held in state.values.values():
        if held.placed.island == island and held.is_made:
            _add_bytes(state, held.placed.slice, -_bytes_of(state, held.placed))
    state.lost.add(island)


def _bytes_of(state: ScheduleState, placed: PlacedResult) -> int:
    return 0 if placed.island in state.lost else placed.size_bytes


def _add_bytes(state: ScheduleState, slice_: str, size: int) -> None:
    held = state.held_bytes.pop(slice_, 0) + size
    if held:
        state.held_bytes[slice_] = held
