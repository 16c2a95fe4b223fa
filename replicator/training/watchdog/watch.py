"""Decide whether a run hangs, from observations of it: no thread, no clock.

Time is counted by observations. A late one means that the whole process stood still
(Ctrl-Z, a suspended machine), so it counts for no more than the usual interval; a
debugger at its prompt stops the count, too. While another process is behind and not in
its step, its own limit counts, not this one's: this process waits in the step for the
other's compiler, input or disk.
"""

import dataclasses
from collections.abc import Sequence

from replicator.monitoring.phases import Current
from replicator.training.watchdog.limits import Limits
from replicator.training.watchdog.peers import Peer

_STEP_TIMES_KEPT = 101
_LATE = 3.0  # observations apart by more ticks than this were late


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One observation of a run.

    Attributes:
      now_s: Time of the observation.
      current: Phase that the run is in.
      steps_s: Seconds in the phase `step` so far.
      in_debugger: Whether the run waits in a debugger.
      peers: The other processes, as far as they are known.
    """

    now_s: float
    current: Current
    steps_s: float
    in_debugger: bool = False
    peers: Sequence[Peer] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WatchState:
    """State of the watchdog between two observations.

    Attributes:
      seen: The last observation.
      counted_s: Seconds of the current phase, as counted by observations.
      step_times_s: Seconds of each of the last steps.
      timed: Step, and seconds in steps, at the last of these.
    """

    seen: Seen | None = None
    counted_s: float = 0.0
    step_times_s: tuple[float, ...] = ()
    timed: tuple[int, float] | None = None


def decide(
    watched: WatchState, seen: Seen, *, limits: Limits
) -> tuple[WatchState, float | None]:
    """Update the state by one observation.

    Args:
      watched: State after the observation before; `WatchState()` at first.
      seen: The observation.
      limits: Longest time of each phase.

    Returns:
      The new state; and the limit of the current phase, if it is exceeded.
    """
    times, timed = _step_times(watched, seen)
    watched = WatchState(
        seen=seen,
        counted_s=_counted_s(watched, seen, limits.tick_s * _LATE),
        step_times_s=times,
        timed=timed,
    )
    limit_s = limits.of(seen.current.phase, times)
    if watched.counted_s < limit_s or seen.in_debugger or _is_held_up(seen, limits):
        return watched, None
    return watched, limit_s


def nears_limit(watched: WatchState, limits: Limits) -> bool:
    """Return whether half of the current phase's limit is over.

    >>> nears_limit(WatchState(), Limits())
    False
    """
    if watched.seen is None:
        return False
    limit_s = limits.of(watched.seen.current.phase, watched.step_times_s)
    return watched.counted_s >= limit_s / 2


def _counted_s(watched: WatchState, seen: Seen, most_s: float) -> float:
    before = watched.seen
    if before is None or before.current != seen.current:
        return min(seen.now_s - seen.current.since_s, most_s)
    if seen.in_debugger:
        return watched.counted_s
    return watched.counted_s + min(seen.now_s - before.now_s, most_s)


def _step_times(
    watched: WatchState, seen: Seen
) -> tuple[tuple[float, ...], tuple[int, float]]:
    step, seconds = seen.current.step, seen.steps_s
    if watched.timed is None or step < watched.timed[0]:
        return watched.step_times_s, (step, seconds)
    steps = step - watched.timed[0]
    if steps == 0:
        return watched.step_times_s, watched.timed
    mean_s = (seconds - watched.timed[1]) / steps
    return (*watched.step_times_s, mean_s)[-_STEP_TIMES_KEPT:], (step, seconds)


def _is_held_up(seen: Seen, limits: Limits) -> bool:
    if seen.current.phase != "step":
        return False
    return any(peer.holds_up(seen.current.step, limits) for peer in seen.peers)
