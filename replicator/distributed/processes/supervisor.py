"""What to do with a group when a process exits, or when somebody asks it to stop.

A pure state machine: `begin` and `decide` return the next state and what to do now; the
driver (`group.py`) does it. The phases of one group:

    running ─ a process fails ─> clearing ─ all gone ─> waiting ─ time up ─> running
       │                            └─ too many restarts without progress ─> ended
       └─ asked to stop, or preempted ─> leaving ─ all gone ─> ended

One failure ends the whole group, as its processes cannot go on without each other. A
restart counts only while the run makes no progress: a job that dies once a day for a
month is restarted each time, a bug at step 17 three times, a NaN never.
"""

import dataclasses
import signal

from replicator.base.host.exit_codes import HUNG, PREEMPTED
from replicator.distributed.processes.guard import KILLED_BY_LAUNCHER
from replicator.distributed.processes.states import (
    Action,
    Asked,
    Decision,
    Event,
    Exit,
    Exited,
    Failure,
    Kill,
    Policy,
    Say,
    Start,
    State,
    Tell,
    TimeUp,
)


def begin(policy: Policy) -> Decision:
    """Start a group for the first time."""
    state = State(policy=policy, live=frozenset(range(policy.processes)))
    return state, [Start(attempt=0)]


def decide(state: State, event: Event, now_s: float) -> Decision:
    """Return what follows from an event, and the state after it.

    Args:
      state: Where the group is.
      event: What happened.
      now_s: When, on the clock of the deadlines.
    """
    match event:
        case Exited():
            return _after_exit(state, event, now_s)
        case Asked():
            return _after_asking(state, event.signal, now_s)
        case TimeUp():
            return _after_time(state, now_s)


def exit_code(code: int) -> int:
    """Turn what a process ended with into what a shell would say: 137 for SIGKILL."""
    return 128 - code if code < 0 else code


def describe_code(code: int, *, out_of_memory: bool = False) -> str:
    """Say how a process ended: "exited with code 1", "was killed by SIGKILL".

    Args:
      code: As `Exited` has it.
      out_of_memory: Whether the kernel killed something for memory meanwhile.
    """
    if code >= 0:
        known = {PREEMPTED: " (preempted)", HUNG: " (hung)"}
        return f"exited with code {code}{known.get(code, '')}"
    if out_of_memory and code == -signal.SIGKILL:
        return "was killed by SIGKILL: the machine was out of memory"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _after_exit(state: State, event: Exited, now_s: float) -> Decision:
    code = (event.code,)
    state = dataclasses.replace(
        state,
        live=state.live - {event.rank},
        codes=state.codes + (() if event.is_symptom else code),
        symptoms=state.symptoms + (code if event.is_symptom else ()),
    )
    actions: list[Action] = []
    if state.phase == "running" and event.code == PREEMPTED:
        state = dataclasses.replace(
            state, phase="leaving", deadline_s=now_s + state.policy.stop_grace_s
        )
    elif state.phase == "running" and event.code != 0:
        state, actions = _fail(state, event, now_s)
    elif state.failure is not None and _explains(event, state.failure):
        state, say = _blame(state, event)
        actions = [say]
    if state.live:
        return state, actions
    state, more = _after_all_exited(state, event.progress, now_s)
    return state, actions + more


def _fail(state: State, event: Exited, now_s: float) -> Decision:
    state, say = _blame(dataclasses.replace(state, phase="clearing"), event)
    if not state.live:
        return state, [say]
    if event.code == HUNG:
        # The others' watchdogs are writing their stacks.
        deadline_s = now_s + state.policy.hung_grace_s
        return dataclasses.replace(state, deadline_s=deadline_s), [say]
    state, kill = _kill(state, now_s)
    return state, [say, *kill]


def _blame(state: State, event: Exited) -> tuple[State, Say]:
    failure = Failure(
        rank=event.rank,
        code=event.code,
        attempt=state.attempt,
        is_symptom=event.is_symptom,
        out_of_memory=event.out_of_memory,
        comes_again=event.comes_again,
    )
    ended = describe_code(event.code, out_of_memory=event.out_of_memory)
    say = Say(message=f"process {event.rank} {ended}")
    return dataclasses.replace(state, failure=failure), say


def _explains(event: Exited, failure: Failure) -> bool:
    """Return whether an exit is the cause of a failure that was noticed before it.

    A process that dies takes its peers along within milliseconds: who is seen first is
    luck.
    """
    ended_itself = event.code not in (0, PREEMPTED, KILLED_BY_LAUNCHER)
    return failure.is_symptom and not event.is_symptom and ended_itself


def _kill(state: State, now_s: float) -> Decision:
    hard = state.kills > 0
    killed = dataclasses.replace(
        state,
        kills=state.kills + 1,
        deadline_s=now_s + state.policy.kill_grace_s,
    )
    return killed, [Kill(hard=hard)]


def _after_all_exited(state: State, progress: int | None, now_s: float) -> Decision:
    state = dataclasses.replace(state, deadline_s=None)
    if state.phase == "clearing" and state.asked is None:
        return _restart_or_give_up(state, progress, now_s)
    if state.phase == "clearing":
        return _end(state, exit_code(-(state.asked or 0)))
    return _end(state, _leaving_code(state))


def _leaving_code(state: State) -> int:
    """Say how a group ended that was not restarted."""
    expected = {0, PREEMPTED}
    if state.asked:
        expected |= {-state.asked, 128 + state.asked}
    if state.kills:
        expected |= {-signal.SIGKILL, KILLED_BY_LAUNCHER}
    unexpected = [code for code in state.codes if code not in expected]
    if unexpected:
        return exit_code(unexpected[0])
    if PREEMPTED in state.codes:
        return PREEMPTED
    if state.symptoms:
        return exit_code(state.symptoms[0])
    if state.asked and any(state.codes):
        return 128 + state.asked
    return KILLED_BY_LAUNCHER if any(state.codes) else 0


def _restart_or_give_up(state: State, progress: int | None, now_s: float) -> Decision:
    assert state.failure is not None, "a group is cleared because a process failed"
    if state.failure.comes_again:
        say = Say(message="not started again: it would end the same way")
        state, end = _end(state, exit_code(state.failure.code), state.failure)
        return state, [say, *end]
    before = -1 if state.progress is None else state.progress
    advanced = progress is not None and progress > before
    idle = 0 if advanced else state.idle_restarts
    first = state.failure if advanced else state.first_failure or state.failure
    state = dataclasses.replace(
        state,
        first_failure=first,
        progress=progress if advanced else state.progress,
    )
    allowed = state.policy.max_restarts
    if idle >= allowed:
        say = Say(message=f"gave up after {allowed} restart(s) without progress")
        state, end = _end(state, exit_code(first.code), first)
        return state, [say, *end]
    backoff_s = min(2.0 ** (idle - 1), state.policy.longest_backoff_s) if idle else 0.0
    say = Say(message=_describe_restart(state.progress, idle + 1, allowed, backoff_s))
    waiting = dataclasses.replace(
        state, phase="waiting", idle_restarts=idle + 1, deadline_s=now_s + backoff_s
    )
    if backoff_s:
        return waiting, [say]
    state, start = _after_time(waiting, now_s)
    return state, [say, *start]


def _describe_restart(
    progress: int | None, number: int, allowed: int, backoff_s: float
) -> str:
    when = f"in {backoff_s:g} s" if backoff_s else "now"
    safe = "" if progress is None else f"; step {progress} is safe"
    return (
        f"starting all processes again {when} (restart {number} of {allowed} without "
        f"progress{safe})"
    )


def _after_asking(state: State, asked: int, now_s: float) -> Decision:
    # A closed terminal is a wish to stop like any other: save, then end.
    wish = signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM
    state = dataclasses.replace(state, asked=state.asked or wish, asks=state.asks + 1)
    if state.phase == "waiting":
        return _end(state, 128 + wish)
    if state.phase == "running":
        leaving = dataclasses.replace(
            state, phase="leaving", deadline_s=now_s + state.policy.stop_grace_s
        )
        say = Say(message=_describe_wish(wish, state.policy.stop_grace_s))
        return leaving, [say, Tell(signal=wish)]
    # Preempted by a signal of its own: the launcher's first is then not an escalation.
    if state.asks >= (3 if wish == signal.SIGINT else 2):
        state, kill = _kill(state, now_s)
        return state, [Say(message="killing all processes"), *kill]
    if wish == signal.SIGINT:
        return state, [Say(message="stopping; press Ctrl-C again to kill")]
    return state, []


def _describe_wish(wish: signal.Signals, grace_s: float) -> str:
    return f"{wish.name}: all processes have {grace_s:g} s to save and end"


def _after_time(state: State, now_s: float) -> Decision:
    if state.phase == "waiting":
        started = dataclasses.replace(
            state,
            phase="running",
            attempt=state.attempt + 1,
            live=frozenset(range(state.policy.processes)),
            codes=(),
            symptoms=(),
            failure=None,
            kills=0,
            deadline_s=None,
        )
        return started, [Start(attempt=started.attempt)]
    if state.kills < 2:
        late = ", ".join(map(str, sorted(state.live)))
        state, kill = _kill(state, now_s)
        return state, [Say(message=f"killing process(es) {late}, out of time"), *kill]
    late = ", ".join(map(str, sorted(state.live)))
    say = Say(message=f"process(es) {late} cannot be killed")
    state, end = _end(state, KILLED_BY_LAUNCHER)
    return state, [say, *end]


def _end(state: State, code: int, failure: Failure | None = None) -> Decision:
    ended = dataclasses.replace(state, phase="ended", deadline_s=None)
    return ended, [Exit(code=code, failure=failure)]
