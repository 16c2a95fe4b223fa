"""Decide what to do when a worker ends, a stop is asked for, or time is up.

A pure state machine: `begin` and `decide` return the next state and what to do now, and
a `Driver` does it: for `replicator launch` (`group.py`), which runs a single group, or
for a program, which runs many units. A **unit** is a worker, or a group of workers that
cannot go on without each other. The phases of a unit:

    running ── a worker fails ──> clearing ── all have ended ──> waiting ──> running
       │                              │                             (time up)
       │ all have ended               └── too many restarts without progress, or
       └──────────────> ended             one cannot be killed ──> the run fails

and of the run:

    running ── fails, or is asked to stop, or preempted ──> stopping
       │                                                       │ grace over, or asked
       │ all units have ended                                  │ once too often
       └──────────────> ended <── all have, or are left ── killing

A run that fails or stops asks all that runs to stop, kills it after a grace, and starts
nothing again. A restart counts only while there is no progress, by time or by steps
that are safe: a worker that dies once a day for a month is restarted each time, one
with a bug at step 17 as often as `Restart` allows, one with a NaN never.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from replicator.distributed.processes.states import (
    Action,
    Decision,
    Ended,
    Event,
    Finish,
    Kill,
    Log,
    Start,
    State,
    StopAsked,
    StopWorkers,
    Timeouts,
    TimeUp,
    Unit,
    UnitState,
)

_SHOWN = {"signal": "Ctrl-C or a signal"}
_DOUBLINGS = 60  # beyond any wait; more would not fit a float


def begin(
    units: Sequence[Unit], now_s: float, *, timeouts: Timeouts | None = None
) -> Decision:
    """Start all units of a run.

    Args:
      units: Units of the run.
      now_s: The time, on the clock of all deadlines.
      timeouts: Time limits.

    >>> state, actions = begin([Unit(workers=("a", "b"))], now_s=0.0)
    >>> actions
    [Start(names=('a', 'b'), attempt=0)]
    """
    state = State(
        timeouts=timeouts or Timeouts(),
        units=tuple(
            UnitState(unit=unit, live=unit.workers, started_s=now_s) for unit in units
        ),
        unit_of={name: at for at, unit in enumerate(units) for name in unit.workers},
    )
    if not units:
        return _end_if_all_have(state)
    return state, [Start(names=unit.workers, attempt=0) for unit in units]


def decide(state: State, event: Event, now_s: float) -> Decision:
    """Return the state after an event, and what to do.

    Args:
      state: State of the run.
      event: Event to react to.
      now_s: Time of the event.

    >>> state, _ = begin([Unit(workers=("a", "b"))], now_s=0.0)
    >>> state, actions = decide(state, StopAsked(by="launcher"), now_s=1.0)
    >>> state.phase, actions[-1]
    ('stopping', StopWorkers(names=('a', 'b')))
    """
    if state.phase == "ended":
        return state, []
    match event:
        case Ended():
            return _after_end(state, event, now_s)
        case StopAsked(of="unit"):
            return state, _stop_unit(state, event.by)
        case StopAsked():
            return _after_asking(state, event.by, now_s)
        case TimeUp():
            return _after_time(state, now_s)


def next_deadline_s(state: State) -> float | None:
    """Return the time at which the next `TimeUp` is due; None for never.

    >>> state, _ = begin([Unit(workers=("a",))], now_s=0.0)
    >>> state, _ = decide(state, StopAsked(by="launcher"), now_s=1.0)
    >>> next_deadline_s(state)
    11.0
    """
    return min((u.due_s for u in state.units if u.due_s is not None), default=None)


def _after_end(state: State, ended: Ended, now_s: float) -> Decision:
    at = state.unit_of.get(ended.name)
    unit = None if at is None else state.units[at]
    # Unknown, reported twice, or of an attempt that was left behind.
    if at is None or unit is None or ended.name not in unit.live:
        return state, []
    if ended.attempt != unit.attempt:
        return state, []
    others = {name: end for name, end in unit.ends.items() if name != ended.name}
    state = _with_unit(
        state,
        at,
        live=tuple(name for name in unit.live if name != ended.name),
        ends={**others, ended.name: ended},
    )
    actions: list[Action] = []
    # Killed by this run: no failure of its own.
    was_killed = ended.looks_killed and unit.kills > 0
    if ended.outcome == "failed" and not was_killed:
        state, actions = _after_failure(state, at, ended, now_s)
    elif ended.outcome == "preempted" and unit.phase == state.phase == "running":
        state = dataclasses.replace(state, stopped_by=ended.name)
        state, stops = _stop_all(state, now_s, but=at)
        actions = [Log(message=ended.text), *stops]
    if state.units[at].live:
        return state, actions
    state, more = _after_all_ended(state, at, now_s)
    return state, actions + more


def _after_failure(state: State, at: int, ended: Ended, now_s: float) -> Decision:
    """Clear the group; or, if that or a stop is under way, keep the real cause.

    One death kills others within milliseconds; any may be observed first.
    """
    unit, say = state.units[at], Log(message=ended.text)
    if unit.phase == "clearing":
        if not _explains(ended, unit.failure):
            return state, []
        return _with_unit(state, at, failure=ended), [say]
    if state.phase == "running":
        return _clear(state, at, ended, now_s)
    if not _explains(ended, state.failure):
        return state, [Log(message=f"{ended.text} (while the run was stopping)")]
    # The first real failure, of a clean stop, or the cause of a symptom seen before.
    return dataclasses.replace(state, failure=ended), [say]


def _explains(ended: Ended, failure: Ended | None) -> bool:
    """Return whether an end is the cause of a failure that was observed before."""
    if ended.is_symptom:
        return False
    return failure is None or failure.is_symptom or ended.explains


def _clear(state: State, at: int, ended: Ended, now_s: float) -> Decision:
    """End the others of a group: they cannot go on."""
    say = Log(message=ended.text)
    grace_s = ended.others_grace_s
    state = _with_unit(
        state,
        at,
        phase="clearing",
        failure=ended,
        failed_s=now_s,
        due_s=now_s + grace_s,
    )
    live = state.units[at].live
    # Without a grace at once; otherwise when its deadline comes.
    if live and not grace_s:
        state, kills = _kill(state, [at], now_s)
        return state, [say, *kills]
    return state, [say]


def _after_all_ended(state: State, at: int, now_s: float) -> Decision:
    if state.units[at].phase == "clearing" and state.phase == "running":
        return _restart_or_give_up(state, at, now_s)
    return _end_if_all_have(_end_unit(state, at))


def _end_unit(state: State, at: int) -> State:
    """End a unit of a run that stops; the failure that cleared it fails the run."""
    failure = state.units[at].failure
    if failure and (state.failure is None or _explains(failure, state.failure)):
        state = dataclasses.replace(state, failure=failure)
    return _with_unit(state, at, phase="ended", due_s=None)


def _restart_or_give_up(state: State, at: int, now_s: float) -> Decision:
    unit = state.units[at]
    failure, restart = unit.failure, unit.unit.restart
    assert failure is not None, "a group is cleared because a worker failed"
    steps = [end.safe_step for end in unit.ends.values() if end.safe_step is not None]
    step = max(steps, default=-1)
    ran_s = unit.failed_s - unit.started_s
    advanced = ran_s >= restart.progress_s or step > unit.safe_step
    idle = 0 if advanced else unit.idle_restarts
    first = failure if advanced else unit.first_failure or failure
    if failure.comes_again:
        again = restart.attempts > 0
        why = "not started again: it would end the same way" if again else ""
        return _give_up(state, at, failure, why, now_s)
    # The failure that began the series is shown: later ones may be its consequences.
    if idle >= restart.attempts:
        why = f"gave up after {idle} restart(s) without progress" if idle else ""
        return _give_up(state, at, first, why, now_s)
    # Each wait is twice the one before.
    waits = idle - unit.unit.restarts_at_once
    backoff_s = restart.backoff_s * 2.0 ** min(waits, _DOUBLINGS) if waits >= 0 else 0.0
    backoff_s = min(backoff_s, state.timeouts.longest_backoff_s)
    state = _with_unit(
        state,
        at,
        phase="waiting",
        due_s=now_s + backoff_s,
        idle_restarts=idle + 1,
        first_failure=first,
        safe_step=max(step, unit.safe_step),
    )
    say = Log(message=_describe_restart(state.units[at], backoff_s))
    if backoff_s:
        return state, [say]
    state, start = _start_again(state, at, now_s)
    return state, [say, *start]


def _describe_restart(unit: UnitState, backoff_s: float) -> str:
    when = f"in {backoff_s:g} s" if backoff_s else "now"
    safe = f"; step {unit.safe_step} is safe" if unit.safe_step >= 0 else ""
    return (
        f"starting {unit.unit.called} again {when} (restart {unit.idle_restarts} of "
        f"{unit.unit.restart.attempts} without progress{safe})"
    )


def _start_again(state: State, at: int, now_s: float) -> Decision:
    unit = state.units[at]
    state = _with_unit(
        state,
        at,
        phase="running",
        attempt=unit.attempt + 1,
        started_s=now_s,
        live=unit.unit.workers,
        failure=None,
        kills=0,
        due_s=None,
    )
    return state, [Start(names=unit.unit.workers, attempt=unit.attempt + 1)]


def _give_up(state: State, at: int, failure: Ended, why: str, now_s: float) -> Decision:
    """Fail the run because of a unit that is not started again."""
    state = _with_unit(state, at, phase="ended", due_s=None)
    state, stops = _stop_all(dataclasses.replace(state, failure=failure), now_s)
    others = sum(len(stop.names) for stop in stops)
    says = [why, f"stopping the other {others} worker(s)" if others else ""]
    state, end = _end_if_all_have(state)
    return state, [*(Log(message=text) for text in says if text), *stops, *end]


def _stop_unit(state: State, name: str) -> list[Action]:
    """Stop the others of a unit whose worker is preempted: all save the same step."""
    unit = state.units[state.unit_of[name]]
    if not unit.phase == state.phase == "running" or name not in unit.live:
        return []
    others = tuple(each for each in unit.live if each != name)
    say = Log(message=f"`{name}` is preempted: it got SIGTERM, not from its launcher")
    return [say, *([StopWorkers(names=others)] if others else [])]


def _after_asking(state: State, by: str, now_s: float) -> Decision:
    needed = state.timeouts.stop_requests_to_kill.get(by)
    state = dataclasses.replace(
        state,
        stopped_by=state.stopped_by or by,
        asks=state.asks + (needed is not None),
    )
    if state.phase == "running":
        state, stops = _stop_all(state, now_s)
        who = f"`{by}`" if by in state.unit_of else _SHOWN.get(by, by)
        again = "; once more kills them" if needed == state.asks + 1 else ""
        grace_s = state.timeouts.stop_grace_s
        say = f"{who} asked for a stop: all have {grace_s:g} s to end{again}"
        state, end = _end_if_all_have(state)
        return state, [*([Log(message=say)] if stops else []), *stops, *end]
    alive = [at for at in _living(state) if not _is_killed(state, at)]
    # Its request does not kill, or all were killed before.
    if needed is None or not alive:
        return state, []
    if state.asks >= needed:
        state, kills = _kill(state, alive, now_s)
        return state, [Log(message="killing all that still run"), *kills]
    if state.asks == needed - 1:
        return state, [Log(message="already stopping; once more kills all")]
    return state, []


def _after_time(state: State, now_s: float) -> Decision:
    actions: list[Action] = []
    late = []
    # Restarts last: nothing is started beside a worker that cannot be killed.
    places = range(len(state.units))
    for at in sorted(places, key=lambda at: state.units[at].phase == "waiting"):
        unit = state.units[at]
        if unit.due_s is None or now_s < unit.due_s:
            continue
        if unit.phase != "waiting" and not _is_killed(state, at):
            late.append(at)
            continue
        act = _start_again if unit.phase == "waiting" else _leave_behind
        state, more = act(state, at, now_s)
        actions += more
    if late:
        text = f"killing {_names(state, late)}: not stopped within the grace"
        state, kills = _kill(state, late, now_s)
        actions += [Log(message=text), *kills]
    return state, actions


def _leave_behind(state: State, at: int, now_s: float) -> Decision:
    """Go on without a unit that cannot be killed; nothing is started beside it."""
    why, unit = f"{_names(state, [at])} cannot be killed", state.units[at]
    failure = unit.first_failure or unit.failure
    if state.phase == "running" and failure is not None:
        return _give_up(state, at, failure, why, now_s)
    state, end = _end_if_all_have(_end_unit(state, at))
    return state, [Log(message=why), *end]


def _stop_all(
    state: State, now_s: float, *, but: int | None = None
) -> tuple[State, list[StopWorkers]]:
    """Stop all units that run, but one; end those that wait for a restart."""
    names: list[str] = []
    for at, unit in enumerate(state.units):
        if unit.phase == "waiting":
            state = _with_unit(state, at, phase="ended", due_s=None)
        elif unit.phase == "running":
            due_s = now_s + state.timeouts.stop_grace_s
            state = _with_unit(state, at, due_s=due_s)
            names += () if at == but else unit.live
    state = dataclasses.replace(state, phase="stopping")
    return state, [StopWorkers(names=tuple(names))] if names else []


def _kill(
    state: State, places: Iterable[int], now_s: float
) -> tuple[State, list[Kill]]:
    kills = []
    for at in places:
        unit = state.units[at]
        kills.append(Kill(names=unit.live))
        due_s = now_s + state.timeouts.kill_grace_s
        state = _with_unit(state, at, kills=unit.kills + 1, due_s=due_s)
    if state.phase == "stopping":
        state = dataclasses.replace(state, phase="killing")
    return state, kills


def _end_if_all_have(state: State) -> Decision:
    if any(unit.phase != "ended" for unit in state.units):
        return state, []
    left = tuple(name for at in _living(state) for name in state.units[at].live)
    finish = Finish(failure=state.failure, stopped_by=state.stopped_by, left=left)
    return dataclasses.replace(state, phase="ended"), [finish]


def _living(state: State) -> list[int]:
    return [at for at, unit in enumerate(state.units) if unit.live]


def _is_killed(state: State, at: int) -> bool:
    """Return whether a unit was killed as often as it may be."""
    return state.units[at].kills >= state.timeouts.kills


def _names(state: State, places: Iterable[int]) -> str:
    return ", ".join(f"`{name}`" for at in places for name in state.units[at].live)


def _with_unit(state: State, at: int, **changes: object) -> State:
    unit = dataclasses.replace(state.units[at], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(
        state, units=(*state.units[:at], unit, *state.units[at + 1 :])
    )
