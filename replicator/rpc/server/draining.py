"""How a server stops: it answers what it has, then gives up what takes too long.

    SERVING ──stop──▶ DRAINING ──no call left──────────────────▶ STOPPED
                         └──`drain_s` over──▶ CANCELLING ──no call left, or `cancel_s`
                                                           over─────────▶ STOPPED

DRAINING takes no new call and says goodbye to every client. CANCELLING tells handlers
that nobody waits for them, and refuses what still waits for a thread. What runs on
after that is named in the log: a thread of Python cannot be ended from outside.
"""

import enum
from typing import NamedTuple


class Phase(enum.IntEnum):
    """Where a server stands; it only goes forward."""

    SERVING = 0
    DRAINING = 1
    CANCELLING = 2
    STOPPED = 3


class Stop(NamedTuple):
    """One stop in progress.

    Attributes:
      phase: Where it stands.
      until_s: When the phase is over at the latest.
    """

    phase: Phase
    until_s: float


def begin(*, until_s: float) -> Stop:
    """Return the state right after the stop was asked for."""
    return Stop(Phase.DRAINING, until_s)


def decide(stop: Stop, *, now_s: float, calls_left: int, cancel_s: float) -> Stop:
    """Return the state that follows; the same one while there is nothing to do.

    Args:
      stop: The state so far.
      now_s: The time of a monotonic clock.
      calls_left: Calls that run or wait.
      cancel_s: How long handlers have to notice that they are cancelled.
    """
    if stop.phase in (Phase.SERVING, Phase.STOPPED):
        return stop
    if calls_left == 0:
        return Stop(Phase.STOPPED, now_s)
    if now_s < stop.until_s:
        return stop
    if stop.phase is Phase.DRAINING:
        return Stop(Phase.CANCELLING, now_s + cancel_s)
    return Stop(Phase.STOPPED, now_s)
