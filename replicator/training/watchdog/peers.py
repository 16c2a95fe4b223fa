"""Heartbeats that watchdogs exchange: their fields, and how to read them."""

import dataclasses
import statistics
from collections.abc import Sequence

from replicator.monitoring.phases import Phase
from replicator.training.watchdog.limits import Limits

STRAGGLER_RATIO = 1.5
_LEAST_EXCESS_S = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """State of one process, as it publishes it (JSON) for the others.

    Attributes:
      count: Number of beats sent; a process whose number stands still is silent.
      phase: Its current phase.
      step: Updates dispatched.
      seconds: Seconds in the current phase.
      own_s: Seconds spent so far on its own, waiting for input or working on the host,
        while the others may have waited for it.
    """

    count: int
    phase: Phase
    step: int
    seconds: float
    own_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another process, as seen from this one.

    Attributes:
      process: Its index.
      beat: Its last beat; None if none was seen.
      silent_s: Seconds since the last new beat.
    """

    process: int
    beat: Beat | None
    silent_s: float

    def holds_up(self, step: int, limits: Limits) -> bool:
        """Return whether a process in `step` waits for this one, within its limits.

        >>> Peer(process=1, beat=None, silent_s=30.0).holds_up(3, Limits())
        True
        """
        if self.beat is None:
            return self.silent_s < limits.start_s
        if self.beat.phase == "step" or self.beat.step > step:
            return False
        # While it sends beats, its own watchdog applies its own limits.
        return self.silent_s < limits.silent_s


def follow(
    before: Sequence[tuple[Beat | None, float]],
    beats: Sequence[Beat | None],
    now_s: float,
) -> tuple[tuple[Beat | None, float], ...]:
    """Return each process's newest beat, with the time when it was first seen.

    >>> follow([(None, 1.0)], [None], 3.0)
    ((None, 1.0),)

    Args:
      before: Result of the call before; empty at first.
      beats: Newest beats, in process order.
      now_s: Current time.
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
      rank: Index of the process.
      own_s: Seconds per step that it spends on its own.
      median_s: Median of these over all processes.
    """

    rank: int
    own_s: float
    median_s: float


def find_straggler(
    before: Sequence[Beat | None], now: Sequence[Beat | None]
) -> Straggler | None:
    """Return the slowest process if it takes 1.5 times as long as the median.

    >>> find_straggler([None, None], [None, None]) is None
    True

    Args:
      before: An earlier beat of each process.
      now: The newest beat of each process.

    Returns:
      The slowest by its own time per step in between; None if all are about as fast,
      or not every process made a step.
    """
    own_s = []
    for first, last in zip(before, now, strict=True):
        if first is None or last is None or last.step <= first.step:
            return None
        own_s.append((last.own_s - first.own_s) / (last.step - first.step))
    # The low median: with two processes the slow one must not be its own measure.
    median_s = statistics.median_low(own_s)
    slowest_s = max(own_s)
    if slowest_s - median_s < max((STRAGGLER_RATIO - 1) * median_s, _LEAST_EXCESS_S):
        return None
    return Straggler(rank=own_s.index(slowest_s), own_s=slowest_s, median_s=median_s)
