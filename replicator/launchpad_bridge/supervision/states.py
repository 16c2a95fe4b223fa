"""The words between a program's decisions and its run: state, events, actions.

Two are those of a launched group as well: that time is up, and what to tell the user.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

from replicator.distributed.processes.states import Say, TimeUp
from replicator.launchpad_bridge.protocols import Exited, Restart, StopAsked

Phase: TypeAlias = Literal["running", "stopping", "killing", "ended"]
"""Where a run is; `supervisor` draws how one follows another."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GracePeriods:
    """How patient a run is with its workers.

    Attributes:
      stop_grace_s: How long they may take to end once asked.
      kill_grace_s: How long a killed one may take to vanish.
      longest_backoff_s: The longest wait before a restart.
    """

    stop_grace_s: float = 10.0
    kill_grace_s: float = 5.0
    longest_backoff_s: float = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """Where one worker is.

    Attributes:
      restart: Whether it is started again after a failure.
      phase: "running", "waiting" for its restart, or "ended".
      attempt: Which start this is, from 0: as often was it restarted.
      started_s: When this attempt began.
      due_s: When it is started again, while it waits.
      idle_restarts: Restarts since it made progress.
      first_failure: Its first failure since it made progress.
      exited: How it ended last.
    """

    restart: Restart
    phase: Literal["running", "waiting", "ended"] = "running"
    attempt: int = 0
    started_s: float
    due_s: float | None = None
    idle_restarts: int = 0
    first_failure: Exited | None = None
    exited: Exited | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Where a run is.

    Attributes:
      patience: How long it waits for what.
      phase: See `supervisor`.
      workers: By name.
      failure: What failed first, in a run that fails.
      stopped_by: Who asked first for the run to stop.
      signals: How often a signal asked.
      killed: Workers that were told to die.
      deadline_s: When this phase is over; None for never.
    """

    patience: GracePeriods
    phase: Phase = "running"
    workers: Mapping[str, WorkerState]
    failure: Exited | None = None
    stopped_by: str | None = None
    signals: int = 0
    killed: frozenset[str] = frozenset()
    deadline_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start a worker."""

    name: str
    attempt: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Ask a worker to stop."""

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """End a worker that did not stop."""

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The run is over.

    Attributes:
      failure: What failed first; None for a run that went well or was stopped.
      stopped_by: Who asked for the stop, if anybody did.
      left: Workers that still run, although they were killed.
    """

    failure: Exited | None = None
    stopped_by: str | None = None
    left: tuple[str, ...] = ()


Event: TypeAlias = Exited | StopAsked | TimeUp
Action: TypeAlias = Start | Stop | Kill | Say | Finish
Decision: TypeAlias = tuple[State, list[Action]]
