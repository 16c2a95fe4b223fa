"""The words between a supervisor's decisions and its driver: state, events, actions."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

RunPhase: TypeAlias = Literal["running", "stopping", "killing", "ended"]
UnitPhase: TypeAlias = Literal["running", "clearing", "waiting", "ended"]
"""Where a run, and a unit of it, is; `supervisor` draws how one follows another."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Whether a failed worker of a group is started again. By default it is not.

    Attributes:
      attempts: Restarts without progress after which the run fails. A worker that ran
        for `progress_s` has made progress: its count begins anew.
      progress_s: How long that is, in seconds.
      backoff_s: The wait before the first restart; it doubles with each, up to 30 s.
    """

    attempts: int = 0
    progress_s: float = 60.0
    backoff_s: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What fails and starts again as one: a worker, or a group of workers.

    Attributes:
      workers: Their names, unlike those of any other unit's.
      restart: Whether all are started again after one has failed.
      restarts_at_once: How many restarts without progress come before the first wait.
      called: What to call them where they are started again.
    """

    workers: tuple[str, ...]
    restart: Restart = dataclasses.field(default_factory=Restart)
    restarts_at_once: int = 0
    called: str = "it"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How patient a run is with its workers.

    Attributes:
      stop_grace_s: How long they may take to end once asked.
      kill_grace_s: How long a killed one may take to vanish.
      longest_backoff_s: The longest wait before a restart.
      kills: How often a worker is killed, the second time harder, before it is left.
      kills_at: Of those who may lose patience: at which of all their requests to stop
        everything is killed. Others may ask as often as they like.
    """

    stop_grace_s: float = 10.0
    kill_grace_s: float = 5.0
    longest_backoff_s: float = 30.0
    kills: int = 1
    kills_at: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"signal": 2}
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A worker has ended.

    Attributes:
      name: The worker's.
      attempt: Its start that ended: 0 for the first.
      outcome: "preempted" ended well, but takes the whole run along.
      text: How it ended, in a line that names it.
      looks_killed: Whether it ended as one does that is killed.
      is_symptom: Whether it only says that another one is gone.
      comes_again: Whether it says why to start it again is of no use.
      others_grace_s: How long the others of its group may go on, if it failed: they are
        writing down what they did.
      safe_step: The highest step that it, or any of its group, has reported as safe.
      exited: What the driver wants to keep of it.
    """

    name: str
    attempt: int
    outcome: Literal["done", "preempted", "failed"]
    text: str
    looks_killed: bool = False
    is_symptom: bool = False
    comes_again: bool = False
    others_grace_s: float = 0.0
    safe_step: int | None = None
    exited: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StopAsked:
    """A worker, or the program's owner, asked for the run to stop.

    Attributes:
      by: A worker's name, "launcher" or "signal".
      of: Who is to stop: all, or, as the worker is preempted, the others of its unit.
    """

    by: str
    of: Literal["run", "unit"] = "run"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeUp:
    """The next deadline has come."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """Where one worker is.

    Attributes:
      phase: "running", "waiting" for its restart or for the others of its group, or
        "ended".
      attempt: Which start this is, from 0: as often was it restarted.
      started_s: When this attempt began.
      ended: How it ended last.
    """

    phase: Literal["running", "waiting", "ended"]
    attempt: int
    started_s: float
    ended: Ended | None

    @property
    def exited(self) -> Any:
        """Return what the driver kept of its last end; None before."""
        return None if self.ended is None else self.ended.exited


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnitState:
    """Where one unit is.

    Attributes:
      unit: Who it is, and what was agreed for it.
      phase: See `supervisor`.
      attempt: Which start this is, from 0.
      started_s: When this attempt began.
      live: Workers that have not ended, in the unit's order.
      ends: How the others ended, and all did in an attempt before; the last one last.
      failure: Who failed in this attempt.
      failed_s: When.
      first_failure: Who failed first since there was progress.
      idle_restarts: Restarts since there was progress.
      safe_step: The highest step that was safe at a restart; -1 for none.
      kills: How often it was killed in this attempt.
      due_s: When this phase is over; None for never.
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
    """Where a run is.

    Attributes:
      patience: How long it waits for what.
      phase: See `supervisor`.
      units: All that it runs.
      unit_of: Where in `units` a worker's is, by name.
      failure: What failed first, in a run that fails.
      stopped_by: Who asked first for the run to stop.
      asks: How often those asked who may lose patience.
    """

    patience: Patience
    phase: RunPhase = "running"
    units: tuple[UnitState, ...]
    unit_of: Mapping[str, int]
    failure: Ended | None = None
    stopped_by: str | None = None
    asks: int = 0

    def worker(self, name: str) -> WorkerState:
        """Return where one worker is."""
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
class Stop:
    """Ask workers to stop."""

    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """End workers that did not stop."""

    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    """Tell the user; one line may hold all that follows from one event."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The run is over.

    Attributes:
      failure: What failed first; None for a run that went well or was stopped.
      stopped_by: Who asked for the stop, if anybody did.
      left: Workers that still run, although they were killed.
    """

    failure: Ended | None = None
    stopped_by: str | None = None
    left: tuple[str, ...] = ()


Event: TypeAlias = Ended | StopAsked | TimeUp
Action: TypeAlias = Start | Stop | Kill | Say | Finish
Decision: TypeAlias = tuple[State, list[Action]]
