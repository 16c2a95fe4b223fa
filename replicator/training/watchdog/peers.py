"""What the watchdogs of several processes tell each other, and what they make of it."""

import dataclasses
import statistics
from collections.abc import Sequence

from replicator.monitoring.phases import Phase
from replicator.training.watchdog.limits import Limits

STRAGGLER_RATIO = 1.5
_LEAST_EXCESS_S = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What one process does, in its own words; as JSON, on the board.

    Attributes:
      count: How many beats it has sent: one that stands still is no beat.
      phase: What it does.
      step: Updates dispatched.
      seconds: How long the phase has lasted.
      own_s: Seconds that it spent on its own so far, waiting for input or at work on
        the host, while the others may have waited for it.
    """

    count: int
    phase: Phase
    step: int
    seconds: float
    own_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another process, as seen from here.

    Attributes:
      process: Which.
      beat: Its last; None if none was seen.
      silent_s: For how long no new one came.
    """

    process: int
    beat: Beat | None
    silent_s: float

    def holds_up(self, step: int, limits: Limits) -> bool:
        """Tell whether who waits in `step` waits for what this process still may do."""
        if self.beat is None:
            return self.silent_s < limits.start_s
        if self.beat.phase == "step" or self.beat.step > step:
            return False
        # While it sends beats its own watchdog lives, and knows its own limits.
        return self.silent_s < limits.silent_s


def follow(
    before: Sequence[tuple[Beat | None, float]],
    beats: Sequence[Beat | None],
    now_s: float,
) -> tuple[tuple[Beat | None, float], ...]:
    """Note when each process's newest beat was first seen.

    Args:
      before: The beats of the last look, each with when it was first seen.
      beats: Those of this one, in process order.
      now_s: When this look is.

    Returns:
      What is `before` for the next look.
    """
    if not before:
        return tuple((beat, now_s) for beat in beats)
    return tuple(
        known if known[0] == beat else (beat, now_s)
        for known, beat in zip(before, beats, strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """The process that the others wait for.

    Attributes:
      rank: Which.
      own_s: Seconds that it takes on its own for each step.
      median_s: What the processes take in the middle.
    """

    rank: int
    own_s: float
    median_s: float


def find_straggler(
    before: Sequence[Beat | None], now: Sequence[Beat | None]
) -> Straggler | None:
    """Name the slowest process if it takes 1.5 times as long as the median.

    Args:
      before: A beat of each process, some time ago.
      now: The newest ones.

    Returns:
      The slowest by its own time per step in between, or None: all are about as fast,
      or not every process made a step.
    """
    own_s = []
    for first, last in zip(before, now, strict=True):
        if first is None or last is None or last.step <= first.step:
            return None
        own_s.append((last.own_s - first.own_s) / (last.step - first.step))
    # With two processes the slow one must not be part of what it is measured by.
    median_s = statistics.median_low(own_s)
    slowest_s = max(own_s)
    if slowest_s - median_s < max((STRAGGLER_RATIO - 1) * median_s, _LEAST_EXCESS_S):
        return None
    return Straggler(rank=own_s.index(slowest_s), own_s=slowest_s, median_s=median_s)
