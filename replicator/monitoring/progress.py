"""Measure a run: rates over a moving window, time left, share of time without input.

Everything comes from a `Clock` and three counts. The first call compiles, so it is
timed apart and no rate contains it.
"""

import dataclasses
from collections import deque

from replicator.base.host.clock import Clock

WINDOW_S = 30.0
_ANCHORS_PER_WINDOW = 60


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgressNumbers:
    """Progress of a run at one moment.

    Attributes:
      step: Updates dispatched so far, those before a resume included.
      steps: Updates wanted; None means until the input ends.
      time_s: The clock when these numbers were taken.
      elapsed_s: Seconds since the run began.
      compile_s: Seconds that the first call took to trace and compile.
      steps_per_s: Updates per second over the window; None before the second call.
      examples_per_s: Real examples per second over the window; None likewise.
      eta_s: Seconds that the remaining steps will take; None while unknown.
      input_stall_share: Part of the window spent waiting for input, 0 to 1.
    """

    step: int
    steps: int | None
    time_s: float
    elapsed_s: float = 0.0
    compile_s: float = 0.0
    steps_per_s: float | None = None
    examples_per_s: float | None = None
    eta_s: float | None = None
    input_stall_share: float | None = None


class Progress:
    """Computes rates from counts; the clock starts when this object is made.

    Args:
      clock: Clock for all times.
      steps: Number of updates of the run, or None.
      window_s: Length of the moving window, in seconds.
    """

    def __init__(self, clock: Clock, *, steps: int | None, window_s: float = WINDOW_S):
        self._clock = clock
        self._steps = steps
        self._window_s = window_s
        self._started_s = clock.now_s()
        self._compile_s = 0.0
        # Past counts, at least window / 60 apart; the first is the window's beginning.
        self._anchors: deque[_Counts] = deque()

    def update(self, *, step: int, examples: int, stall_s: float) -> ProgressNumbers:
        """Take the counts after a call of the step was dispatched.

        Args:
          step: Updates so far.
          examples: Real examples so far.
          stall_s: Seconds waited for input so far.
        """
        now = _Counts(self._clock.now_s(), step, examples, stall_s)
        if not self._anchors:
            self._compile_s = max(0.0, now.time_s - self._started_s - stall_s)
            self._anchors.append(now)
        self._move_window(now)
        return self._numbers(self._anchors[0], now)

    def _move_window(self, now: "_Counts") -> None:
        anchors = self._anchors
        while len(anchors) > 1 and anchors[1].time_s <= now.time_s - self._window_s:
            anchors.popleft()
        if now.time_s - anchors[-1].time_s >= self._window_s / _ANCHORS_PER_WINDOW:
            anchors.append(now)

    def _numbers(self, then: "_Counts", now: "_Counts") -> ProgressNumbers:
        span_s = now.time_s - then.time_s
        steps_per_s = examples_per_s = stall_share = None
        if span_s > 0 and now.step > then.step:
            steps_per_s = (now.step - then.step) / span_s
            examples_per_s = (now.examples - then.examples) / span_s
            stall_share = min(1.0, (now.stall_s - then.stall_s) / span_s)
        return ProgressNumbers(
            step=now.step,
            steps=self._steps,
            time_s=now.time_s,
            elapsed_s=now.time_s - self._started_s,
            compile_s=self._compile_s,
            steps_per_s=steps_per_s,
            examples_per_s=examples_per_s,
            eta_s=self._eta_s(now.step, steps_per_s),
            input_stall_share=stall_share,
        )

    def _eta_s(self, step: int, steps_per_s: float | None) -> float | None:
        if self._steps is None or not steps_per_s:
            return None
        return (self._steps - step) / steps_per_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Counts:
    time_s: float
    step: int
    examples: int
    stall_s: float
