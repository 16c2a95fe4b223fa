"""The words between a launcher's decisions and its driver: state, events, actions."""

import dataclasses
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["running", "leaving", "clearing", "waiting", "ended"]
"""Where a group is; `supervisor` draws how one follows another."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How patient a launcher is.

    Attributes:
      processes: How many processes the group has.
      max_restarts: Restarts without progress before the group is given up.
      stop_grace_s: How long processes may take to end once asked.
      hung_grace_s: How long the others may write their stacks once one said it hung.
      kill_grace_s: How long a killed process may take to vanish.
      longest_backoff_s: The longest wait before a restart; the first is at once, then
        1, 2, 4, … s.
    """

    processes: int
    max_restarts: int = 3
    stop_grace_s: float = 300.0
    hung_grace_s: float = 5.0
    kill_grace_s: float = 5.0
    longest_backoff_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The process that failed first in one attempt.

    Attributes:
      rank: Which process.
      code: What it ended with; negative is the signal that killed it.
      attempt: In which attempt, from 0.
      is_symptom: Whether it only says that another one is gone.
      out_of_memory: As in `Exited`.
      comes_again: As in `Exited`.
    """

    rank: int
    code: int
    attempt: int
    is_symptom: bool = False
    out_of_memory: bool = False
    comes_again: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Where a group is.

    Attributes:
      policy: How patient the launcher is.
      phase: See the module.
      attempt: How often the group was started, less one.
      live: Processes that have not exited.
      codes: What the others exited with, in order, symptoms apart.
      symptoms: What those exited with that fell because another one had.
      failure: Who failed first in this attempt.
      first_failure: Who failed first since there was progress.
      idle_restarts: Restarts since there was progress.
      progress: The highest step that was ever safe.
      asked: The signal that asked the group to stop.
      asks: How often it was asked.
      kills: 0, 1 after everything was killed, 2 after that was not enough.
      deadline_s: When `TimeUp` is due; None for never.
    """

    policy: Policy
    phase: Phase = "running"
    attempt: int = 0
    live: frozenset[int]
    codes: tuple[int, ...] = ()
    symptoms: tuple[int, ...] = ()
    failure: Failure | None = None
    first_failure: Failure | None = None
    idle_restarts: int = 0
    progress: int | None = None
    asked: int | None = None
    asks: int = 0
    kills: int = 0
    deadline_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """A process has exited.

    Attributes:
      rank: Which process.
      code: What with; negative is a signal.
      is_symptom: Whether it fell because another one had: it says that a peer is gone.
      progress: The highest step that any process has reported so far.
      out_of_memory: Whether the kernel killed something for memory while it lived.
      comes_again: Whether it says why to start it again is of no use.
    """

    rank: int
    code: int
    is_symptom: bool = False
    progress: int | None = None
    out_of_memory: bool = False
    comes_again: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The launcher got a signal."""

    signal: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeUp:
    """`deadline_s` has come."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start all processes."""

    attempt: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tell:
    """Send a signal to all processes that live."""

    signal: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Kill all that lives of the group; `hard` if it was tried before."""

    hard: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    """Tell the user."""

    message: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """End the launcher; `failure` is the one whose last lines are shown again."""

    code: int
    failure: Failure | None = None


Event: TypeAlias = Exited | Asked | TimeUp
Action: TypeAlias = Start | Tell | Kill | Say | Exit
Decision: TypeAlias = tuple[State, list[Action]]
