"""Rules of `replicator launch`: its one group, and its exit codes."""

import dataclasses
import math
import signal
from collections.abc import Sequence
from typing import NamedTuple

from replicator.distributed.processes import states
from replicator.distributed.processes.exits import describe_code, meaning
from replicator.distributed.processes.guard import KILLED_BY_LAUNCHER
from replicator.distributed.processes.symptoms import comes_again, is_symptom
from replicator.exit_codes import HUNG, PREEMPTED


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPolicy:
    """Size of a group, its restarts and its time limits.

    Attributes:
      processes: Number of processes in the group.
      max_restarts: Number of restarts without progress before the group is given up.
      stop_grace_s: Seconds that processes may take to end once asked.
      hung_grace_s: Seconds that the others may write their stacks once one has hung.
      kill_grace_s: Seconds that a killed process may take to vanish.
      longest_backoff_s: Seconds of the longest wait before a restart; the first is at
        once, then 1, 2, 4, …

    >>> LaunchPolicy(processes=2).unit.workers
    ('process 0', 'process 1')
    """

    processes: int
    max_restarts: int = 3
    stop_grace_s: float = 300.0
    hung_grace_s: float = 5.0
    kill_grace_s: float = 5.0
    longest_backoff_s: float = 60.0

    @property
    def unit(self) -> states.Unit:
        """Unit of the supervisor that the group is."""
        return states.Unit(
            workers=tuple(map(process_name, range(self.processes))),
            # Progress is a step that is safe, however long a process ran.
            restart=states.Restart(
                attempts=self.max_restarts, progress_s=math.inf, backoff_s=1.0
            ),
            restarts_at_once=1,
            called="all processes",
        )

    @property
    def timeouts(self) -> states.Timeouts:
        """Time limits, as the supervisor takes them."""
        return states.Timeouts(
            stop_grace_s=self.stop_grace_s,
            kill_grace_s=self.kill_grace_s,
            longest_backoff_s=self.longest_backoff_s,
            kills=2,
            # A user who waits for a save presses Ctrl-C once more.
            stop_requests_to_kill={"SIGINT": 3, "SIGTERM": 2},
        )


class ProcessEnd(NamedTuple):
    """End of a process of the group.

    Attributes:
      rank: Its number in the group.
      code: Exit code, negative for a signal.
      last_lines: Last lines of its standard error.
      out_of_memory: Whether the kernel killed a process for memory while it lived.
      comes_again: Whether it is known that it would end the same way.
    """

    rank: int
    code: int
    last_lines: Sequence[bytes]
    out_of_memory: bool = False
    comes_again: bool = False


def process_name(rank: int) -> str:
    """Return the name of a process.

    >>> process_name(2)
    'process 2'
    """
    return f"process {rank}"


def ended(
    end: ProcessEnd,
    state: states.State,
    *,
    hung_grace_s: float = 0.0,
    safe_step: int | None = None,
) -> states.Ended:
    """Return the supervisor's event for the end of a process.

    Args:
      end: Exit of the process.
      state: State of the group.
      hung_grace_s: As in `LaunchPolicy`.
      safe_step: The highest step that any process has reported so far.
    """
    [unit] = state.units
    name, code = process_name(end.rank), end.code
    asked = _signal_asked(state)
    how = meaning(code)
    if asked and code in (-asked, 128 + asked):
        how = "done"
    # Its guard is killed as well only the second time.
    is_killed = how == "killed" and (code != -signal.SIGKILL or unit.kills > 1)
    return states.Ended(
        name=name,
        attempt=unit.attempt,
        outcome=how if how in ("done", "preempted") else "failed",
        text=f"{name} {describe_code(code, out_of_memory=end.out_of_memory)}",
        looks_killed=is_killed,
        is_symptom=is_symptom(end.last_lines),
        explains=_explains(code, unit.failure or state.failure),
        comes_again=end.comes_again or (code == 1 and comes_again(end.last_lines)),
        others_grace_s=hung_grace_s if how == "hung" else 0.0,
        safe_step=safe_step,
        exited=end,
    )


def stop_asked(number: int) -> states.StopAsked:
    """Return the request to stop for a signal; SIGHUP asks to save and end, too.

    >>> stop_asked(signal.SIGHUP).by
    'SIGTERM'
    """
    return states.StopAsked(by="SIGINT" if number == signal.SIGINT else "SIGTERM")


def signal_asked(by: str | None) -> signal.Signals | None:
    """Return the signal by which a stop was asked for; None if it was not a signal.

    Args:
      by: As `StopAsked` has it.

    >>> signal_asked("SIGINT"), signal_asked("process 1")
    (<Signals.SIGINT: 2>, None)
    """
    return {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(by or "")


def exit_code(state: states.State, finish: states.Finish) -> int:
    """Return the exit code of the launcher, as of a shell: 137 for SIGKILL.

    Args:
      state: State of the group.
      finish: Outcome of the run.
    """
    [unit] = state.units
    asked = _signal_asked(state)
    if finish.left:
        return KILLED_BY_LAUNCHER
    if asked and unit.failure is not None:  # asked while it cleared up, or waited
        return 128 + asked
    if finish.failure is not None:
        code = finish.failure.exited.code
        # Who ends as asked may fail its peers before they get the signal. But a run
        # that hung can go on, and its scheduler has to know.
        if asked and code != HUNG:
            return 128 + asked
        return 128 - code if code < 0 else code
    # Nothing failed. Whoever preempts asks this launcher too, so 75 comes before 143.
    codes = [end.exited.code for end in unit.ends.values()]
    if PREEMPTED in codes:
        return PREEMPTED
    return 128 + asked if asked and any(codes) else 0


def _signal_asked(state: states.State) -> signal.Signals | None:
    asked = signal_asked(state.stopped_by)
    # A preempted process ended first; a scheduler sends this one to all.
    return signal.SIGTERM if asked is None and state.asks else asked


def _explains(code: int, first: states.Ended | None) -> bool:
    """Return whether an end is the cause of an exception that was observed first.

    A peer's exception may follow from the death, in words that `symptoms` does not
    know. Not so the other way round, but for SIGABRT: libraries abort without a peer.
    """
    if first is None or first.comes_again or first.exited.code != 1:
        return False
    return code < 0 and code != -signal.SIGABRT
