"""What a hook learns of a step, and when.

A step has two moments. *Its state is there* (`on_state`): it was dispatched, and the
next step, to which the state is donated, was not. *Its metrics are there*
(`on_metrics`): the next step is dispatched, so reading leaves no device without work.
Checkpoints and evaluation belong to the first, numbers to the second. A checkpoint is
of hooks that have seen its step: before one, metrics are shown at once.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.monitoring.phases import Phase
from replicator.monitoring.progress import ProgressNumbers


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
      ended: Whether the run came to its end here.
      goes_on: Tells whether a step is to follow: some are left, and no hook that was
        called before wants to stop.
      show_metrics: Shows all hooks the metrics of this step now, before the next one
        is dispatched; waits for them, and raises, or goes back, if one is bad. Call it
        before the state is kept for good.
    """

    read_state: Callable[[], PyTree]
    position: Any = None
    ended: bool = False
    goes_on: Callable[[], bool] = lambda: True
    show_metrics: Callable[[], None] = lambda: None

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
        """After each step, one call late or before a save: read its metrics or not."""

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
        """Take over what a hook of this type returned: the first what the first did."""

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
