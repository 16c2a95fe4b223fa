"""Decide which waiting calls run together, and when. Pure: no thread, no clock.

A call joins the oldest batch that it fits and that has room, or opens one. A batch may
run when it is full, or when `timeout_s` have passed since its first call; of those that
may, the oldest runs first, at most `max_parallelism` at once. While none may start, a
batch whose time is over goes on filling.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

CallId: TypeAlias = Any
"""What tells calls apart, by `==`; the driver's own business."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchRules:
    """When calls run together.

    Attributes:
      batch_size: Calls in a full batch.
      max_parallelism: Batches that run at once.
      timeout_s: How long the first call of a batch waits for others.
    """

    batch_size: int
    max_parallelism: int
    timeout_s: float


class Batch(NamedTuple):
    """Calls that fit each other and wait; `due_s` is when they wait no longer."""

    fit: Hashable
    calls: tuple[CallId, ...]
    due_s: float


class Batches(NamedTuple):
    """The state: what waits, oldest first, and how many batches run."""

    waiting: tuple[Batch, ...] = ()
    running: int = 0


class Arrived(NamedTuple):
    """A call came."""

    call: CallId
    fit: Hashable
    now_s: float


class TimePassed(NamedTuple):
    """Somebody who watched looked at the clock."""

    now_s: float


class Finished(NamedTuple):
    """A batch has run."""

    now_s: float


class Left(NamedTuple):
    """A caller gave up; one that already runs stays where it is."""

    call: CallId
    now_s: float


class Run(NamedTuple):
    """Run these calls together, now."""

    calls: tuple[CallId, ...]


class Watch(NamedTuple):
    """Let this call look at the clock at `due_s`, for all of its batch."""

    call: CallId
    due_s: float


Event: TypeAlias = Arrived | TimePassed | Finished | Left
Action: TypeAlias = Run | Watch


def decide(
    rules: BatchRules, state: Batches, event: Event
) -> tuple[Batches, Sequence[Action]]:
    """Return the state after an event, and what is to be done.

    Args:
      rules: When calls run together.
      state: As it was.
      event: What happened.
    """
    watches: Sequence[Action] = ()
    match event:
        case Arrived():
            state, watches = _join(rules, state, event)
        case Left(call):
            state, watches = _without(state, call)
        case Finished():
            state = state._replace(running=state.running - 1)
    state, runs = _start(rules, state, event.now_s)
    started = {call for run in runs for call in run.calls}
    return state, [*(watch for watch in watches if watch.call not in started), *runs]


def _join(
    rules: BatchRules, state: Batches, event: Arrived
) -> tuple[Batches, Sequence[Watch]]:
    waiting = list(state.waiting)
    for place, batch in enumerate(waiting):
        if batch.fit == event.fit and len(batch.calls) < rules.batch_size:
            waiting[place] = batch._replace(calls=(*batch.calls, event.call))
            return state._replace(waiting=tuple(waiting)), ()
    opened = Batch(event.fit, (event.call,), event.now_s + rules.timeout_s)
    watch = Watch(event.call, opened.due_s)
    return state._replace(waiting=(*waiting, opened)), (watch,)


def _without(state: Batches, call: CallId) -> tuple[Batches, Sequence[Watch]]:
    """Take a call out; who is first of its batch then watches in its place."""
    waiting, watches = [], []
    for batch in state.waiting:
        left = tuple(other for other in batch.calls if other != call)
        if left:
            waiting.append(batch._replace(calls=left))
            if left[0] != batch.calls[0]:
                watches.append(Watch(left[0], batch.due_s))
    return state._replace(waiting=tuple(waiting)), watches


def _start(
    rules: BatchRules, state: Batches, now_s: float
) -> tuple[Batches, Sequence[Run]]:
    """Start what may run, oldest first, as long as there is room."""
    waiting, runs = [], []
    for batch in state.waiting:
        may_run = len(batch.calls) >= rules.batch_size or batch.due_s <= now_s
        if may_run and state.running + len(runs) < rules.max_parallelism:
            runs.append(Run(batch.calls))
        else:
            waiting.append(batch)
    if not runs:
        return state, ()
    return Batches(tuple(waiting), state.running + len(runs)), runs
