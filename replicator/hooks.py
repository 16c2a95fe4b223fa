"""Do something every so many steps or seconds: write, report, call back.

A step has two moments. *Its state is there* (`on_state`): it was dispatched, and the
next step, to which the state is donated, was not. *Its metrics are there*
(`on_metrics`): the next step is dispatched, so reading leaves no device without work.
Checkpoints and evaluation belong to the first, numbers to the second.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from replicator.base.types import PyTree
from replicator.errors import (
    ArgumentError,
    check_function,
    check_number,
    check_whole,
)
from replicator.monitoring.display import Display
from replicator.monitoring.pending_metrics import PendingMetrics
from replicator.monitoring.phases import Phase
from replicator.monitoring.progress import ProgressNumbers
from replicator.monitoring.writers.writer import Writer, check_writer, named_numbers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """What hooks learn of a step at either moment.

    Attributes:
      step: Updates done, this one included: the first step is 1.
      advanced: Updates since the event before; above 1 for `on_state` if a call makes
        several.
      examples: Real examples seen by this run, this step included.
      progress: Rates, taken when the step was dispatched.
    """

    step: int
    advanced: int
    examples: int
    progress: ProgressNumbers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateEvent(StepEvent):
    """A step was dispatched and its state is there.

    Attributes:
      read_state: Returns the state, which is put together when somebody asks.
      position: Where the input is after the step's batch, if it says so.
      in_flight: The metrics that no hook has been shown yet; None at the end.
      require_finite: Waits for the metrics of all steps so far, and raises, or goes
        back, if one is bad: call it before the state is kept for good.
    """

    read_state: Callable[[], PyTree]
    position: Any = None
    in_flight: PendingMetrics | None = None
    require_finite: Callable[[], None] = lambda: None

    @property
    def state(self) -> PyTree:
        """The state after the step.

        It is donated to the next step: what a hook keeps of it after it returned must
        be a copy. It is to be read: what a hook changes in it does not come to the next
        step.

        Raises:
          ArgumentError: The next step has it already.
        """
        return self.read_state()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricsEvent(StepEvent):
    """A step's metrics can be read without holding up the step after it.

    Attributes:
      read_metrics: Fetches the metrics; the first of all hooks to ask pays for it.
    """

    read_metrics: Callable[[], PyTree]

    @property
    def metrics(self) -> PyTree:
        """The step's metrics, as NumPy arrays on the host."""
        return self.read_metrics()


class Hook(Protocol):
    """A periodic effect: subclass it and say what happens at the moments you need.

    Attributes:
      phase: What the run's time is spent on while this hook has a state.
    """

    phase: Phase = "report"

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end after this step, as if its steps were done."""
        return False

    def on_state(self, event: StateEvent) -> None:
        """After each call of the step: its state may be read until this returns."""

    def on_metrics(self, event: MetricsEvent) -> None:
        """After each step, one call late: its metrics may be read or not."""

    def on_end(self, event: StateEvent) -> None:
        """Once, with the final state, if the run came to its end."""

    def close(self) -> None:
        """Once, also when a run that had begun failed: give back what is held."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a run that goes on from here must know, as plain JSON.

        It is saved after the `on_state` of a step, and is the same in all processes. A
        run that is saved asks before its first step, too, to see that it is JSON.
        """
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what a hook of this kind, in this place, returned before."""

    def flush(self) -> None:
        """Return when all that was written is safe; called from another thread."""


def checked_hooks(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    """Return the hooks of a run, each in its place.

    Raises:
      ArgumentError: `hooks` is no list, or holds what is no hook.
    """
    try:
        listed = tuple(hooks)
    except TypeError as failure:
        raise ArgumentError(
            f"`hooks` must be a list of hooks, got {hooks!r}. Put it in a list."
        ) from failure
    for hook in listed:
        if isinstance(hook, type):
            raise ArgumentError(
                f"`hooks` must hold hooks only, got the class `{hook.__name__}`. Make "
                f"one: `{hook.__name__}(...)`."
            )
        if not all(hasattr(hook, name) for name in _OF_A_HOOK):
            raise ArgumentError(
                f"`hooks` must hold hooks only, got {hook!r}. Subclass "
                "`replicator.hooks.Hook`, or wrap a function: `Callback(fn, "
                "every(n_steps=1))`."
            )
    return listed


_OF_A_HOOK = tuple(name for name in vars(Hook) if not name.startswith("_"))


@dataclasses.dataclass(frozen=True, slots=True)
class Every:
    """A schedule: due every `n_steps` or `seconds`, whichever comes first."""

    n_steps: int | None
    seconds: float | None

    def decide(
        self, last_s: float | None, event: StepEvent
    ) -> tuple[float | None, bool]:
        """Say whether `event` is due.

        Args:
          last_s: When the last due event was; None before the first event.
          event: What happened.

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


def every(*, n_steps: int | None = None, seconds: float | None = None) -> Every:
    """Make a schedule, due at multiples of `n_steps`, or after `seconds`, or both.

    Raises:
      ArgumentError: Neither is given, or one is not positive.
    """
    if n_steps is None and seconds is None:
        raise ArgumentError(
            "`every` must have `n_steps` or `seconds`, got neither. "
            "Write `every(n_steps=100)`."
        )
    if n_steps is not None:
        check_whole("n_steps", n_steps)
    if n_steps is not None and n_steps < 1:
        raise ArgumentError(
            f"`n_steps` must be at least 1, got {n_steps}. Leave a hook out to stop it."
        )
    if seconds is not None:
        check_number("seconds", seconds)
    if seconds is not None and not seconds > 0:
        raise ArgumentError(
            f"`seconds` must be positive, got {seconds}. Use `n_steps=1` for each step."
        )
    return Every(n_steps, seconds)


class _Scheduled:
    """What all hooks with a schedule keep for a run that goes on: how it stands."""

    _trigger: "Trigger"

    def state_dict(self) -> dict[str, Any] | None:
        """Return how long ago it was due."""
        return self._trigger.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self._trigger.load_state(state)


class Callback(_Scheduled, Hook):
    """Call `fn(event)` with a step's metrics.

    Args:
      fn: Takes a `MetricsEvent`; what it raises ends the run.
      when: At which steps; they are met exactly.

    Raises:
      ArgumentError: `fn` is no function of an event, or `when` no schedule.
    """

    def __init__(self, fn: Callable[[MetricsEvent], None], when: Every):
        check_function("fn", fn, "event")
        self._fn = fn
        self._trigger = Trigger(when)

    def on_metrics(self, event: MetricsEvent) -> None:
        """Call `fn` if due."""
        if self._trigger.pulled(event):
            self._fn(event)


class StateCallback(_Scheduled, Hook):
    """Call `fn(event)` with a step's state, before the next step is dispatched.

    Args:
      fn: Takes a `StateEvent`; what it raises ends the run.
      when: At which steps. If a call makes several steps only the state after the last
        of them exists: then the first call that reaches a due step counts.

    Raises:
      ArgumentError: `fn` is no function of an event, or `when` no schedule.
    """

    def __init__(self, fn: Callable[[StateEvent], None], when: Every):
        check_function("fn", fn, "event")
        self._fn = fn
        self._trigger = Trigger(when)

    def on_state(self, event: StateEvent) -> None:
        """Call `fn` if due."""
        if self._trigger.pulled(event):
            self._fn(event)


class WriteMetrics(_Scheduled, Hook):
    """Write a step's numbers, and with them the rates, as `progress/...`.

    The last step of a run is written, too. The writer is closed with the run.

    Args:
      writer: Where to.
      when: At which steps; they are met exactly.
    """

    def __init__(self, writer: Writer, when: Every | None = None):
        check_writer("writer", writer)
        self._writer = writer
        self._trigger = Trigger(when or every(n_steps=10))
        self._unwritten: MetricsEvent | None = None

    def on_metrics(self, event: MetricsEvent) -> None:
        """Write the numbers if due."""
        self._unwritten = event
        if self._trigger.pulled(event):
            self._write(event)

    def on_end(self, event: StateEvent) -> None:
        """Write the last step."""
        if self._unwritten is not None:
            self._write(self._unwritten)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._unwritten = None
        self._writer.close()

    def flush(self) -> None:
        """Return when all that was written is on the disk."""
        self._writer.flush()

    def _write(self, event: MetricsEvent) -> None:
        self._unwritten = None
        rates = {
            "progress/steps_per_s": event.progress.steps_per_s,
            "progress/examples_per_s": event.progress.examples_per_s,
            "progress/input_stall_share": event.progress.input_stall_share,
        }
        known = {name: rate for name, rate in rates.items() if rate is not None}
        self._writer.write(event.step, named_numbers(event.metrics) | known)


class Report(Hook):
    """Show the first step, the last, and in between as often as the display can use.

    Args:
      display: Where to; see `replicator.monitoring.display.make_display`.
      when: At which steps; the display's own interval by default.
    """

    def __init__(self, display: Display, when: Every | None = None):
        self._display = display
        self._trigger = Trigger(when or every(seconds=display.interval_s))
        self._shown_step: int | None = None
        self._newest: MetricsEvent | None = None

    def on_metrics(self, event: MetricsEvent) -> None:
        """Show the numbers if due."""
        self._newest = event
        if self._trigger.pulled(event) or self._shown_step is None:
            self._show(event)

    def on_end(self, event: StateEvent) -> None:
        """Show the last step."""
        if self._newest is not None and self._newest.step != self._shown_step:
            self._show(self._newest)

    def close(self) -> None:
        """Close the display."""
        self._newest = None
        self._display.close()

    def _show(self, event: MetricsEvent) -> None:
        self._shown_step = event.step
        scalars = named_numbers(event.metrics, max_ndim=0)
        self._display.show(event.progress, scalars)


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
        self._waited_s = 0.0  # at the newest event; before the first: of a run before

    def pulled(self, event: StepEvent) -> bool:
        """Tell whether `event` is due; call it once for each event."""
        now_s = event.progress.time_s
        if self._last_s is None:
            self._last_s = now_s - self._waited_s
        self._last_s, due = self._when.decide(self._last_s, event)
        self._waited_s = now_s - self._last_s
        return due

    def state_dict(self) -> dict[str, Any] | None:
        """Return how long it has waited; None where no time counts."""
        return None if self._when.seconds is None else {"waited_s": self._waited_s}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on waiting where another one stopped."""
        self._waited_s = float(state.get("waited_s", 0.0))
