"""Schedules: due every so many steps or seconds."""

import dataclasses
from typing import Any

from replicator.base.tracebacks import short_traceback
from replicator.errors import ArgumentError, check_count, check_positive
from replicator.hooks.protocol import StepEvent


@dataclasses.dataclass(frozen=True, slots=True)
class Every:
    """A schedule: due every `n_steps` or `seconds`, whichever comes first."""

    n_steps: int | None
    seconds: float | None

    def decide(
        self, last_s: float | None, event: StepEvent
    ) -> tuple[float | None, bool]:
        """Return the state after `event`, and whether it is due.

        Args:
          last_s: Time of the last due event; None before the first event.
          event: Event of a step.

        Returns:
          The `last_s` for the next event, and whether this one is due.
        """
        now_s = event.progress.time_s
        if last_s is None:
            last_s = now_s
        due = self._steps_passed(event) or (
            self.seconds is not None and now_s - last_s >= self.seconds
        )
        return (now_s if due else last_s), due

    def trigger(self) -> "Trigger":
        """Return a driver that keeps this schedule's state between events."""
        return Trigger(self)

    def _steps_passed(self, event: StepEvent) -> bool:
        if self.n_steps is None:
            return False
        before = event.step - event.advanced
        return event.step // self.n_steps > before // self.n_steps


@short_traceback
def every(*, n_steps: int | None = None, seconds: float | None = None) -> Every:
    """Return a schedule, due at multiples of `n_steps`, or after `seconds`, or both.

    Raises:
      ArgumentError: Neither is given, or one is not positive.

    >>> often = every(n_steps=100)
    >>> hook = hooks.Callback(lambda event: print(event.metrics), often)
    """
    if n_steps is None and seconds is None:
        raise ArgumentError(
            "`every` must have `n_steps` or `seconds`, got neither. "
            "Write `every(n_steps=100)`."
        )
    if n_steps is not None:
        check_count("n_steps", n_steps, "Leave a hook out to stop it.")
    if seconds is not None:
        check_positive("seconds", seconds, "Use `n_steps=1` for each step.")
    return Every(n_steps, seconds)


def as_schedule(name: str, when: int | Every) -> Every:
    """Return the schedule that the argument `name` stands for.

    >>> as_schedule("eval_every", 100)
    Every(n_steps=100, seconds=None)

    Raises:
      ArgumentError: It is a number below 1, or no schedule.
    """
    if isinstance(when, Every):
        return when
    check_count(name, when)
    return every(n_steps=when)


class Trigger:
    """Drives a schedule: keeps its state between events."""

    def __init__(self, when: Every):
        if not isinstance(when, Every):
            raise ArgumentError(
                f"`when` must be a schedule, got {when!r}. Write "
                f"`every(n_steps={when if isinstance(when, int) else 10})`."
            )
        self._when = when
        self._last_s: float | None = None
        self._waited_s = 0.0  # at the newest event; before the first: of an earlier run

    def pulled(self, event: StepEvent) -> bool:
        """Return whether `event` is due; call it once for each event."""
        now_s = event.progress.time_s
        if self._last_s is None:
            self._last_s = now_s - self._waited_s
        self._last_s, due = self._when.decide(self._last_s, event)
        self._waited_s = now_s - self._last_s
        return due

    def state_dict(self) -> dict[str, Any] | None:
        """Return the seconds that it has waited; None for a schedule of steps."""
        return None if self._when.seconds is None else {"waited_s": self._waited_s}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue the wait of another trigger."""
        self._waited_s = float(state.get("waited_s", 0.0))


class Scheduled:
    """Base of hooks with a schedule, which saves the schedule's state."""

    _trigger: Trigger

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the schedule."""
        return self._trigger.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state of the schedule."""
        self._trigger.load_state(state)
