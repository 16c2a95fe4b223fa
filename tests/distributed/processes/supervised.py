"""Runs of units as the supervisor sees them: events in, what was done for each."""

from replicator.distributed.processes.states import Ended, Log, Restart, Timeouts, Unit
from replicator.distributed.processes.supervisor import begin, decide

TIMEOUTS = Timeouts(stop_grace_s=10, kill_grace_s=5)
ONE = Restart(attempts=1, progress_s=60, backoff_s=0.5)
THREE = Restart(attempts=3, progress_s=60, backoff_s=0.5)


def alone(name, restart=None):
    """Return a unit of one worker."""
    return Unit(workers=(name,), restart=restart or Restart())


def play(units, *events, timeouts=TIMEOUTS):
    """Return the last state, and what was done for each event, words apart.

    Args:
      units: Units, or names of workers.
      events: Each at its second, or (second, event).
    """
    units = [alone(unit) if isinstance(unit, str) else unit for unit in units]
    state, _ = begin(units, 0.0, timeouts=timeouts)
    done = []
    for second, event in enumerate(events):
        now_s, event = event if isinstance(event, tuple) else (second, event)
        state, actions = decide(state, event, float(now_s))
        done.append([action for action in actions if not isinstance(action, Log)])
    return state, done


def words(state, event, now_s=0.0):
    """Return what is said after an event."""
    _, actions = decide(state, event, now_s)
    return [action.message for action in actions if isinstance(action, Log)]


def ended(name, attempt=0, **how):
    """Return that a worker ended well, or how else."""
    text = f"`{name}` ended"
    return Ended(name=name, attempt=attempt, **{"outcome": "done", "text": text, **how})


def failed(name, attempt=0, **how):
    return ended(name, attempt, outcome="failed", **how)


def fell(name, attempt=0, **how):
    """Return that a worker failed as another one was gone."""
    return failed(name, attempt, is_symptom=True, **how)


def killed(name, attempt=0, **how):
    """Return that a worker ended as one that is killed does."""
    return failed(name, attempt, looks_killed=True, **how)


def crash(unit, attempt=0, **how):
    """Return how all of a unit ends: the last one fails, the others are killed."""
    *others, last = unit.workers
    first = failed(last, attempt, **how)
    return [first, *(killed(name, attempt, **how) for name in others)]
