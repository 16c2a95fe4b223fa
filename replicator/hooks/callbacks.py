"""Call a function of the user on a schedule."""

from collections.abc import Callable

from replicator.errors import check_function
from replicator.hooks.protocol import Hook, MetricsEvent, StateEvent
from replicator.hooks.schedule import Every, Scheduled, Trigger


class Callback(Scheduled, Hook):
    """Call `fn(event)` with a step's metrics.

    Args:
      fn: Takes a `MetricsEvent`; its error ends the run.
      when: Schedule; its steps are met exactly.

    Raises:
      ArgumentError: `fn` is not a function of an event, or `when` not a schedule.
    """

    def __init__(self, fn: Callable[[MetricsEvent], None], when: Every):
        check_function("fn", fn, "event")
        self._fn = fn
        self._trigger = Trigger(when)

    def on_metrics(self, event: MetricsEvent) -> None:
        """Call `fn` if due."""
        if self._trigger.pulled(event):
            self._fn(event)


class StateCallback(Scheduled, Hook):
    """Call `fn(event)` with a step's state, before the next step is dispatched.

    Args:
      fn: Takes a `StateEvent`; its error ends the run.
      when: Schedule. If a call makes several steps only the state after the last
        of them exists: then the first call that reaches a due step counts.

    Raises:
      ArgumentError: `fn` is not a function of an event, or `when` not a schedule.
    """

    def __init__(self, fn: Callable[[StateEvent], None], when: Every):
        check_function("fn", fn, "event")
        self._fn = fn
        self._trigger = Trigger(when)

    def on_state(self, event: StateEvent) -> None:
        """Call `fn` if due."""
        if self._trigger.pulled(event):
            self._fn(event)
