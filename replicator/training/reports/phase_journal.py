"""Write the time of each phase into the journal, every few seconds.

From these events `goodput` adds up the time of a run over all its processes, killed
ones included.
"""

import os
import time
from pathlib import Path

from replicator.hooks.protocol import Hook, StateEvent
from replicator.hooks.schedule import every
from replicator.monitoring.events import EventLog
from replicator.monitoring.phases import Phases

_INTERVAL_S = 10.0
_STAT = Path("/proc/self/stat")


class JournalPhases(Hook):
    """Write a `phases` event now, every `interval_s` and at the end.

    Its fields: `step`, `seconds` by phase since the run was opened in this process, and
    `launch_s`, the seconds from the process's start until then, if known.

    Make it once the step to resume from is known, and put it after all hooks whose time
    counts, so that its last event is the last of all.

    Args:
      events: Journal of the run.
      phases: Phases of the run.
      start_step: Updates made before.
      interval_s: Seconds between events.
    """

    def __init__(
        self,
        events: EventLog,
        phases: Phases,
        *,
        start_step: int,
        interval_s: float = _INTERVAL_S,
    ):
        self._events = events
        self._phases = phases
        self._trigger = every(seconds=interval_s).trigger()
        self._step = start_step
        alive_s = process_age_s()
        opened_s = sum(phases.seconds().values())
        self._launch_s = None
        if alive_s is not None:
            self._launch_s = round(max(0.0, alive_s - opened_s), 4)
        self._note()

    def on_state(self, event: StateEvent) -> None:
        """Write an event if it is time."""
        self._step = event.step
        if self._trigger.pulled(event):
            self._note()

    def close(self) -> None:
        """Write the last event."""
        self._note()

    def _note(self) -> None:
        spent = self._phases.seconds().items()
        self._events.write(
            "phases",
            step=self._step,
            seconds={phase: round(spent_s, 4) for phase, spent_s in spent if spent_s},
            launch_s=self._launch_s,
        )


def process_age_s() -> float | None:
    """Return the seconds since this process started; None if unknown (no Linux)."""
    try:
        # The name in parentheses may hold anything; after it the 20th is the start.
        fields = _STAT.read_text().rpartition(")")[2].split()
    except OSError:  # no Linux
        return None
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
