"""A clock shared by all processes, so that hooks due by time fire on the same step.

Clocks differ, and a process that saves while another trains would wait for ever. So
schedules see the time of process 0, sent to all about once a second, at steps that
follow from the times sent before: steps in between exchange nothing. What is due by
time comes up to a second late, or a step if that takes longer.
"""

import itertools

from replicator.distributed.agreement import exchange

_PERIOD_S = 1.0
_MOST_STEPS = 10_000
_numbers = itertools.count()


class AgreedTime:
    """The time of process 0, the same in all; each process makes one for a run."""

    def __init__(self) -> None:
        self._name = f"time-{next(_numbers)}"
        self._next_step = 0
        self._steps = 1  # between two exchanges
        self._last: tuple[int, float] | None = None  # step and time of the last one

    def at(self, step: int, now_s: float) -> float:
        """Return the shared time after a step.

        Args:
          step: Updates made; never less than in the call before.
          now_s: Time of this process's clock.
        """
        if self._last is not None and step < self._next_step:
            return self._last[1]
        agreed_s = float(exchange(self._name, now_s)[0])
        self._steps = steps_to_next(self._steps, self._last, (step, agreed_s))
        self._last = (step, agreed_s)
        self._next_step = step + self._steps
        return agreed_s


def steps_to_next(
    steps: int, before: tuple[int, float] | None, now: tuple[int, float]
) -> int:
    """Return the number of steps until the next exchange of the time.

    >>> steps_to_next(64, (0, 0.0), (64, 0.5))  # a second later, at this pace
    128

    Args:
      steps: Number of steps before this exchange.
      before: Step and time of the exchange before; None at the first one.
      now: Step and time of this exchange.
    """
    if before is None or now[0] <= before[0]:
        return steps
    step_s = (now[1] - before[1]) / (now[0] - before[0])
    wanted = _MOST_STEPS if step_s <= 0 else int(_PERIOD_S / step_s)
    # Compilation makes the first steps slow: the number grows at most twofold.
    return max(1, min(wanted, 2 * steps, _MOST_STEPS))
