"""What to do when a worker ends, when somebody asks to stop, when time is up.

A pure state machine: `begin` and `decide` return the next state and what to do now; a
run performs it. The phases of a run:

    running ── a worker fails, or somebody asks to stop ──> stopping
       │                                                        │ grace over, or asked
       │ all workers have ended                                 │ twice by a signal
       ├───────────────> ended <─────── all have ended ─────────┤
       └─ (also)           ^                                    v
                           └── all have ended, or time is up ── killing

One failure fails the run at once: the others are asked to stop and killed after a
grace. Only a group that wants it (`Restart`) has a failed worker started again, a
while later, while its restarts bring progress: a worker that dies once a day for a
month is restarted each time, one with a bug in its first minute `attempts` times.
"""

import dataclasses
from collections.abc import Mapping

from replicator.errors import NodeFailedError
from replicator.launchpad_bridge.protocols import Exited, Restart, StopAsked
from replicator.launchpad_bridge.supervision.states import (
    Action,
    Decision,
    Event,
    Finish,
    GracePeriods,
    Kill,
    Say,
    Start,
    State,
    Stop,
    TimeUp,
    WorkerState,
)
from replicator.launchpad_bridge.supervision.symptoms import is_symptom

_SIGNAL = "signal"


def begin(
    workers: Mapping[str, Restart],
    now_s: float,
    *,
    patience: GracePeriods | None = None,
) -> Decision:
    """Start all workers of a run.

    Args:
      workers: By name, whether they are started again after a failure.
      now_s: The time, on the clock of all deadlines.
      patience: How long to wait for what.
    """
    begun = {
        name: WorkerState(restart=restart, started_s=now_s)
        for name, restart in workers.items()
    }
    state = State(patience=patience or GracePeriods(), workers=begun)
    if not begun:
        return _end(state)
    return state, [Start(name=name, attempt=0) for name in begun]


def decide(state: State, event: Event, now_s: float) -> Decision:
    """Return the state after an event, and what to do.

    Args:
      state: Where the run is.
      event: What happened.
      now_s: When.
    """
    if state.phase == "ended":
        return state, []
    match event:
        case Exited():
            return _after_exit(state, event, now_s)
        case StopAsked():
            return _after_asking(state, event.by, now_s)
        case TimeUp():
            return _after_time(state, now_s)


def next_deadline_s(state: State) -> float | None:
    """Return when the next `TimeUp` is due; None for never."""
    dues = [worker.due_s for worker in state.workers.values()]
    return min(
        (due for due in (*dues, state.deadline_s) if due is not None), default=None
    )


def describe(exited: Exited) -> str:
    """Say in one line how a worker ended: "`actor/2` raised ValueError: …"."""
    error = exited.error
    if isinstance(error, NodeFailedError):
        return _first_line(error)
    if error is not None:
        text = f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
        return f"`{exited.name}` raised {text}"
    return f"`{exited.name}` {exited.outcome}"


def _after_exit(state: State, exited: Exited, now_s: float) -> Decision:
    worker = state.workers.get(exited.name)
    if worker is None or worker.phase != "running" or worker.attempt != exited.attempt:
        return state, []
    failed = exited.outcome in ("raised", "died")
    if failed and state.phase == "running" and worker.restart.attempts:
        return _restart_or_give_up(state, exited, now_s)
    state = _with_worker(state, exited.name, phase="ended", exited=exited)
    actions: list[Action] = []
    if failed:
        state, actions = _after_failure(state, exited, now_s)
    state, more = _end_if_all_have(state)
    return state, actions + more


def _after_failure(state: State, exited: Exited, now_s: float) -> Decision:
    """Fail the run; or, where it is stopping anyway, see what the failure tells."""
    if state.phase == "running":
        state = dataclasses.replace(state, failure=exited)
        state, actions = _stop_all(state, now_s)
        return state, [Say(message=_describe_end(describe(exited), state)), *actions]
    symptom = is_symptom(exited.error)
    if exited.outcome == "died" and exited.name in state.killed:
        return state, []
    if symptom or (state.failure is not None and not is_symptom(state.failure.error)):
        return state, [Say(message=f"{describe(exited)} (while the run was stopping)")]
    # The first real failure: of a clean stop, or the cause of what was noticed before.
    say = Say(message=describe(exited))
    return dataclasses.replace(state, failure=exited), [say]


def _restart_or_give_up(state: State, exited: Exited, now_s: float) -> Decision:
    worker = state.workers[exited.name]
    restart = worker.restart
    advanced = now_s - worker.started_s >= restart.progress_s
    idle = 0 if advanced else worker.idle_restarts
    first = exited if advanced else worker.first_failure or exited
    if idle >= restart.attempts:
        state = _with_worker(state, exited.name, phase="ended", exited=exited)
        state = dataclasses.replace(state, failure=first)
        gave_up = (
            f"`{exited.name}` was given up after {idle} restart(s) without progress"
        )
        message = f"{describe(exited)}; {gave_up}"
        state, stops = _stop_all(state, now_s)
        state, end = _end_if_all_have(state)
        return state, [Say(message=_describe_end(message, state)), *stops, *end]
    backoff_s = min(restart.backoff_s * 2.0**idle, state.patience.longest_backoff_s)
    state = _with_worker(
        state,
        exited.name,
        phase="waiting",
        due_s=now_s + backoff_s,
        idle_restarts=idle + 1,
        first_failure=first,
        exited=exited,
    )
    message = (
        f"{describe(exited)}; starting it again in {backoff_s:g} s (restart {idle + 1} "
        f"of {restart.attempts} without progress)"
    )
    return state, [Say(message=message)]


def _after_asking(state: State, by: str, now_s: float) -> Decision:
    is_signal = by == _SIGNAL
    state = dataclasses.replace(
        state,
        stopped_by=state.stopped_by or by,
        signals=state.signals + is_signal,
    )
    if state.phase == "running":
        state, stops = _stop_all(state, now_s)
        who = "Ctrl-C or a signal" if is_signal else by
        who = f"`{by}`" if by in state.workers else who
        again = "; once more kills them" if is_signal else ""
        grace_s = state.patience.stop_grace_s
        message = f"{who} asked for a stop: workers have {grace_s:g} s to end{again}"
        state, end = _end_if_all_have(state)
        return state, [*([] if end else [Say(message=message)]), *stops, *end]
    if is_signal and state.signals >= 2 and state.phase == "stopping":
        state, kills = _kill_all(state, now_s)
        return state, [Say(message="killing all workers"), *kills]
    if is_signal and state.phase == "stopping":
        return state, [Say(message="already stopping; once more kills all workers")]
    return state, []


def _after_time(state: State, now_s: float) -> Decision:
    if state.deadline_s is not None and now_s >= state.deadline_s:
        late = ", ".join(f"`{name}`" for name in _running(state))
        if state.phase == "stopping":
            say = Say(message=f"killing {late}: not stopped within the grace")
            state, kills = _kill_all(state, now_s)
            return state, [say, *kills]
        say = Say(message=f"{late} cannot be killed")
        state, end = _end(state)
        return state, [say, *end]
    actions: list[Action] = []
    for name, worker in state.workers.items():
        if worker.due_s is not None and now_s >= worker.due_s:
            attempt = worker.attempt + 1
            state = _with_worker(
                state,
                name,
                phase="running",
                attempt=attempt,
                started_s=now_s,
                due_s=None,
            )
            actions.append(Start(name=name, attempt=attempt))
    return state, actions


def _stop_all(state: State, now_s: float) -> Decision:
    """Ask whoever runs; who waits for a restart does not come again."""
    for name, worker in state.workers.items():
        if worker.phase == "waiting":
            state = _with_worker(state, name, phase="ended", due_s=None)
    deadline_s = now_s + state.patience.stop_grace_s
    state = dataclasses.replace(state, phase="stopping", deadline_s=deadline_s)
    return state, [Stop(name=name) for name in _running(state)]


def _kill_all(state: State, now_s: float) -> Decision:
    late = _running(state)
    state = dataclasses.replace(
        state,
        phase="killing",
        killed=state.killed | set(late),
        deadline_s=now_s + state.patience.kill_grace_s,
    )
    return state, [Kill(name=name) for name in late]


def _end_if_all_have(state: State) -> Decision:
    if any(worker.phase != "ended" for worker in state.workers.values()):
        return state, []
    return _end(state)


def _end(state: State) -> Decision:
    finish = Finish(
        failure=state.failure, stopped_by=state.stopped_by, left=_running(state)
    )
    return dataclasses.replace(state, phase="ended", deadline_s=None), [finish]


def _running(state: State) -> tuple[str, ...]:
    return tuple(n for n, worker in state.workers.items() if worker.phase == "running")


def _with_worker(state: State, name: str, **changes: object) -> State:
    worker = dataclasses.replace(state.workers[name], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(state, workers={**state.workers, name: worker})


def _describe_end(message: str, state: State) -> str:
    others = len(_running(state))
    if not others:
        return message
    return f"{message}; stopping the other {others} worker(s)"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
