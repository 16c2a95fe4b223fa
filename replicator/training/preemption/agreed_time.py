"""One time for all processes, by exchange: what is due by it is due in all at once.

Clocks differ, and a process that saves while another trains waits for ever. So the time
that schedules see is that of process 0, told to all about once a second, at steps that
follow from what was told before: no step in between asks anybody. So what is due by
the clock comes up to a second late, or a step if that takes longer.
"""

import itertools

from replicator.distributed.agreement import exchange

_PERIOD_S = 1.0
_MOST_STEPS = 10_000
_numbers = itertools.count()


class AgreedTime:
    """The time of process 0, the same in all; all processes make one for a run."""

    def __init__(self) -> None:
        self._name = f"time-{next(_numbers)}"
        self._next_step = 0
        self._steps = 1  # from one time to the next
        self._told: tuple[int, float] | None = None  # when it was last told, and what

    def at(self, step: int, now_s: float) -> float:
        """Return the time that all processes go by after a step.

        Args:
          step: Updates done; never less than at the call before.
          now_s: The clock of this process.
        """
        if self._told is not None and step < self._next_step:
            return self._told[1]
        agreed_s = float(exchange(self._name, now_s)[0])
        self._steps = steps_to_next(self._steps, self._told, (step, agreed_s))
        self._told = (step, agreed_s)
        self._next_step = step + self._steps
        return agreed_s


def steps_to_next(
    steps: int, before: tuple[int, float] | None, now: tuple[int, float]
) -> int:
    """Say after how many more steps the time is to be told again.

    Args:
      steps: How many it was.
      before: Step and time when it was told before; None at the first time.
      now: Step and time of this time.
    """
    if before is None or now[0] <= before[0]:
        return steps
    step_s = (now[1] - before[1]) / (now[0] - before[0])
    wanted = _MOST_STEPS if step_s <= 0 else int(_PERIOD_S / step_s)
    # Compilation makes the first steps slow: it may only grow by and by.
    return max(1, min(wanted, 2 * steps, _MOST_STEPS))
