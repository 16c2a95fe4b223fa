"""What a run is doing now, and for how long it did what: one note with many readers.

The loop's thread writes it; others only read. The watchdog asks how long the current
phase has lasted, goodput adds the phases up. A phase that begins inside another one
(a compile inside a step) is counted apart from it, so that all seconds add up to the
time since the note was opened.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

from replicator.base.host.clock import Clock, SystemClock

Phase: TypeAlias = Literal[
    "start", "restore", "compile", "input", "step", "save", "evaluate", "report", "end"
]
"""What can take time: `step` is the useful part, and the wait for devices in it. What
the host does while devices have steps to do holds nobody up, and counts as `step`."""

PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Current:
    """The phase that a run is in.

    Attributes:
      phase: Its name.
      since_s: The clock when it began, or was come back to.
      step: Updates dispatched by then.
    """

    phase: Phase
    since_s: float
    step: int


class Phases:
    """Notes the phase that a run is in, from its loop's thread.

    Args:
      clock: Where time comes from; the system's by default.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        # One tuple, replaced whole: other threads never see half a change. Its last
        # number is what the phase had lasted before it was entered this time.
        now_s = self._clock.now_s()
        self._current: tuple[Phase, float, int, float] = ("start", now_s, 0, 0.0)

    @property
    def clock(self) -> Clock:
        """Where time comes from."""
        return self._clock

    @property
    def current(self) -> Current:
        """The phase that the run is in; safe to ask from any thread."""
        phase, since_s, step, _ = self._current
        return Current(phase=phase, since_s=since_s, step=step)

    def enter(
        self, phase: Phase, *, step: int | None = None, hidden: bool = False
    ) -> None:
        """Leave the current phase for `phase`.

        Args:
          phase: What happens from now on.
          step: Updates dispatched so far, where that changed.
          hidden: Whether devices had steps to do all through the phase that ends.
        """
        before, since_s, at_step, lasted_s = self._current
        now_s = self._clock.now_s()
        if hidden and before != "step":
            self._seconds[before] = lasted_s
            self._seconds["step"] += now_s - since_s
        else:
            self._seconds[before] = lasted_s + now_s - since_s
        step = at_step if step is None else step
        self._current = (phase, now_s, step, self._seconds[phase])

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` for a while, then again in what was before."""
        outer = self._current[0]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def seconds(self) -> dict[Phase, float]:
        """Return how long each phase lasted so far; safe to ask from any thread."""
        phase, since_s, _, lasted_s = self._current
        seconds = dict(self._seconds)
        seconds[phase] = lasted_s + self._clock.now_s() - since_s
        return seconds
