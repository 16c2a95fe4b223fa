"""Decide whether a run hangs, from what it was seen to do: no thread, no clock.

Time is counted by looks. One that comes late was late because the whole process stood
still (Ctrl-Z, a suspended machine), so of the time before it only as much counts as
looks are apart; a debugger at its prompt stops the count, too. While a process that is
behind us does something else than its step, its own limit counts, not ours: we wait in
the step for its compiler, its input or its disk.
"""

import dataclasses
from collections.abc import Sequence

from replicator.monitoring.phases import Current
from replicator.training.watchdog.limits import Limits
from replicator.training.watchdog.peers import Peer

_STEP_TIMES_KEPT = 101
_LATE = 3.0  # looks apart by more ticks than this were late


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One look at a run.

    Attributes:
      now_s: When.
      current: The phase that it is in.
      steps_s: Seconds in the phase `step` so far.
      in_debugger: Whether a person looks at it through a debugger.
      peers: The other processes, as far as they are known.
    """

    now_s: float
    current: Current
    steps_s: float
    in_debugger: bool = False
    peers: Sequence[Peer] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What is remembered between two looks.

    Attributes:
      seen: The last look.
      counted_s: How long the current phase lasted, by looks.
      step_times_s: Of the last steps.
      timed: The step, and the seconds in steps, at the last of these.
    """

    seen: Seen | None = None
    counted_s: float = 0.0
    step_times_s: tuple[float, ...] = ()
    timed: tuple[int, float] | None = None


def decide(
    watched: Watched, seen: Seen, *, limits: Limits
) -> tuple[Watched, float | None]:
    """Take in one look.

    Args:
      watched: From the look before; `Watched()` at first.
      seen: The look.
      limits: How long phases may last.

    Returns:
      What to remember; and how long the current phase may last, if it took longer.
    """
    times, timed = _step_times(watched, seen)
    watched = Watched(
        seen=seen,
        counted_s=_counted_s(watched, seen, limits.tick_s * _LATE),
        step_times_s=times,
        timed=timed,
    )
    limit_s = limits.of(seen.current.phase, times)
    if watched.counted_s < limit_s or seen.in_debugger or _is_held_up(seen, limits):
        return watched, None
    return watched, limit_s


def nears_limit(watched: Watched, limits: Limits) -> bool:
    """Tell whether half of what the current phase may last is over."""
    if watched.seen is None:
        return False
    limit_s = limits.of(watched.seen.current.phase, watched.step_times_s)
    return watched.counted_s >= limit_s / 2


def _counted_s(watched: Watched, seen: Seen, most_s: float) -> float:
    before = watched.seen
    if before is None or before.current != seen.current:
        return min(seen.now_s - seen.current.since_s, most_s)
    if seen.in_debugger:
        return watched.counted_s
    return watched.counted_s + min(seen.now_s - before.now_s, most_s)


def _step_times(
    watched: Watched, seen: Seen
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
