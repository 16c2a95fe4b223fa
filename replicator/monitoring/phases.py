"""Current phase of a run and the time in each: one object with many readers.

The loop's thread writes it; others only read. The watchdog reads the time in the
current phase, goodput adds the phases up. A phase that begins inside another one (a
compile inside a step) is counted apart from it, so that all seconds add up to the time
since the object was made.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

from replicator.base.host.clock import Clock, SystemClock

Phase: TypeAlias = Literal[
    "start", "restore", "compile", "input", "step", "save", "evaluate", "report", "end"
]
"""Uses of time: `step` is the useful one, with the wait for devices in it. Work of the
host while devices have steps to do delays nothing, and counts as `step`."""

PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Current:
    """The phase that a run is in.

    Attributes:
      phase: Name of the phase.
      since_s: Time when it began, or was resumed.
      step: Updates dispatched by then.
    """

    phase: Phase
    since_s: float
    step: int


class Phases:
    """Keeps the phase that a run is in; written by its loop's thread.

    Args:
      clock: Clock for all times; the system's by default.

    >>> phases = Phases()
    >>> phases.enter("step", step=3)
    >>> phases.current.phase, phases.current.step
    ('step', 3)
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        # No lock: one tuple, replaced whole, so other threads never see half a change.
        # Its last number is the time in the phase before it was entered this time.
        now_s = self.clock.now_s()
        self._current: tuple[Phase, float, int, float] = ("start", now_s, 0, 0.0)

    @property
    def current(self) -> Current:
        """The phase that the run is in; safe to read from any thread."""
        phase, since_s, step, _ = self._current
        return Current(phase=phase, since_s=since_s, step=step)

    def enter(
        self, phase: Phase, *, step: int | None = None, hidden: bool = False
    ) -> None:
        """Leave the current phase for `phase`.

        Args:
          phase: The phase from now on.
          step: Updates dispatched so far, if that changed.
          hidden: Whether devices had steps to do all through the phase that ends.
        """
        before, since_s, at_step, lasted_s = self._current
        now_s = self.clock.now_s()
        if hidden and before != "step":
            self._seconds[before] = lasted_s
            self._seconds["step"] += now_s - since_s
        else:
            self._seconds[before] = lasted_s + now_s - since_s
        step = at_step if step is None else step
        self._current = (phase, now_s, step, self._seconds[phase])

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` for a while, then in the one before again."""
        outer = self._current[0]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def seconds(self) -> dict[Phase, float]:
        """Return the seconds in each phase so far; safe to call from any thread."""
        phase, since_s, _, lasted_s = self._current
        seconds = dict(self._seconds)
        seconds[phase] = lasted_s + self.clock.now_s() - since_s
        return seconds
