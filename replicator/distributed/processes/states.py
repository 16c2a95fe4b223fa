"""States, events and actions of the supervisor, between it and its driver."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

RunPhase: TypeAlias = Literal["running", "stopping", "killing", "ended"]
UnitPhase: TypeAlias = Literal["running", "clearing", "waiting", "ended"]
"""Phases of a run, and of a unit; `supervisor` draws how one follows another."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Restarts of a failed worker of a group. By default there are none.

    Attributes:
      attempts: Number of restarts without progress after which the run fails. A worker
        that ran for `progress_s` has made progress: its count begins anew.
      progress_s: Seconds that count as progress.
      backoff_s: Seconds before the first restart; they double with each, up to 30.
    """

    attempts: int = 0
    progress_s: float = 60.0
    backoff_s: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A worker, or a group of workers, that fails and starts again as one.

    Attributes:
      workers: Names of the workers, each in one unit only.
      restart: Restarts of all of them after one has failed.
      restarts_at_once: Number of restarts without progress before the first wait.
      called: Name of all of them in messages about a restart.
    """

    workers: tuple[str, ...]
    restart: Restart = dataclasses.field(default_factory=Restart)
    restarts_at_once: int = 0
    called: str = "it"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Time limits of a run for its workers.

    Attributes:
      stop_grace_s: Seconds that they may take to end once asked.
      kill_grace_s: Seconds that a killed one may take to vanish.
      longest_backoff_s: Seconds of the longest wait before a restart.
      kills: Number of times that a worker is killed before it is left behind.
      stop_requests_to_kill: Number of requests to stop at which everything is killed,
        by who asks (`StopAsked.by`). Requests of others kill nothing, however many.
    """

    stop_grace_s: float = 10.0
    kill_grace_s: float = 5.0
    longest_backoff_s: float = 30.0
    kills: int = 1
    stop_requests_to_kill: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"signal": 2}
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A worker has ended.

    Attributes:
      name: Name of the worker.
      attempt: Number of the start that ended, from 0.
      outcome: "done", "failed", or "preempted": it ended well, but stops the whole run.
      text: One line that names it and describes its end.
      looks_killed: Whether it ended as a killed worker does.
      is_symptom: Whether it failed only because another one is gone.
      explains: Whether it is the cause of the failure that was observed first.
      comes_again: Whether it would fail the same way if it were started again.
      others_grace_s: Seconds that the others of its group may go on if it failed: they
        write their stacks, or save.
      safe_step: Highest step that it, or any of its group, has reported as safe.
      exited: Details that the driver keeps of it.
    """

    name: str
    attempt: int
    outcome: Literal["done", "preempted", "failed"]
    text: str
    looks_killed: bool = False
    is_symptom: bool = False
    explains: bool = False
    comes_again: bool = False
    others_grace_s: float = 0.0
    safe_step: int | None = None
    exited: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StopAsked:
    """A worker, or the program's owner, asked for the run to stop.

    Attributes:
      by: Name of a worker, "launcher" or "signal".
      of: "run" to stop all; "unit", from a preempted worker, to stop its unit.
    """

    by: str
    of: Literal["run", "unit"] = "run"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeUp:
    """The next deadline has come."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """State of one worker.

    Attributes:
      phase: "running", "waiting" for its restart or for the others of its group, or
        "ended".
      attempt: Number of restarts so far.
      started_s: Time at which this attempt began.
      ended: Its last end.
    """

    phase: Literal["running", "waiting", "ended"]
    attempt: int
    started_s: float
    ended: Ended | None

    @property
    def exited(self) -> Any:
        """Details that the driver kept of its last end; None before."""
        return None if self.ended is None else self.ended.exited


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnitState:
    """State of one unit.

    Attributes:
      unit: Its workers and their restarts.
      phase: See `supervisor`.
      attempt: Number of restarts so far.
      started_s: Time at which this attempt began.
      live: Workers that have not ended, in the unit's order.
      ends: Last end of each other worker, or of all in the attempt before; in order.
      failure: First failure of this attempt.
      failed_s: Time of that failure.
      first_failure: First failure since there was progress.
      idle_restarts: Number of restarts since there was progress.
      safe_step: Highest step that was safe at a restart; -1 for none.
      kills: Number of times that it was killed in this attempt.
      due_s: Time at which this phase is over; None for never.
    """

    unit: Unit
    phase: UnitPhase = "running"
    attempt: int = 0
    started_s: float
    live: tuple[str, ...]
    ends: Mapping[str, Ended] = dataclasses.field(default_factory=dict)
    failure: Ended | None = None
    failed_s: float = math.inf
    first_failure: Ended | None = None
    idle_restarts: int = 0
    safe_step: int = -1
    kills: int = 0
    due_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """State of a run.

    Attributes:
      timeouts: Its time limits.
      phase: See `supervisor`.
      units: All units that it runs.
      unit_of: Index in `units` of each worker's unit, by name of the worker.
      failure: First failure, in a run that fails.
      stopped_by: First `StopAsked.by` of a request to stop.
      asks: Number of requests to stop that count for `Timeouts.stop_requests_to_kill`.
    """

    timeouts: Timeouts
    phase: RunPhase = "running"
    units: tuple[UnitState, ...]
    unit_of: Mapping[str, int]
    failure: Ended | None = None
    stopped_by: str | None = None
    asks: int = 0

    def worker(self, name: str) -> WorkerState:
        """Return the state of one worker."""
        # Any thread may ask: nothing here changes once it is made.
        unit = self.units[self.unit_of[name]]
        gone = "ended" if unit.phase == "ended" else "waiting"
        return WorkerState(
            phase="running" if name in unit.live else gone,
            attempt=unit.attempt,
            started_s=unit.started_s,
            ended=unit.ends.get(name),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start all workers of a unit."""

    names: tuple[str, ...]
    attempt: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StopWorkers:
    """Ask workers to stop."""

    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """End workers that did not stop."""

    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Log a message; one line may hold all that follows from one event."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The run is over.

    Attributes:
      failure: First failure; None for a run that went well or was stopped.
      stopped_by: First `StopAsked.by`; None if nobody asked for a stop.
      left: Workers that still run, although they were killed.
    """

    failure: Ended | None = None
    stopped_by: str | None = None
    left: tuple[str, ...] = ()


Event: TypeAlias = Ended | StopAsked | TimeUp
Action: TypeAlias = Start | StopWorkers | Kill | Log | Finish
Decision: TypeAlias = tuple[State, list[Action]]
