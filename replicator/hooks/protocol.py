"""Protocol of hooks, and the events of a step that they get.

A step has two moments. *Its state is there* (`on_state`): it was dispatched, and the
next step, to which the state is donated, was not. *Its metrics are there*
(`on_metrics`): the next step is dispatched, so reading leaves no device without work.
Checkpoints and evaluation belong to the first, numbers to the second. Before a
checkpoint metrics are shown at once, so hooks in it have seen its step.
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
    """Event of a step at either moment.

    Attributes:
      step: Number of updates done, this one included: the first step is 1.
      advanced: Updates since the event before; above 1 for `on_state` if a call makes
        several.
      examples: Number of real examples in this run, this step included.
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
      read_state: Returns the state, which is put together at the first call.
      position: Position of the input after the step's batch, if it has one.
      ended: Whether the run came to its end here.
      goes_on: Returns whether a step follows: some are left, and no hook that was
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

        It is donated to the next step: a hook that keeps a part of it after it returned
        must copy it. Changes that a hook makes in it do not reach the next step.

        Raises:
          ArgumentError: The next step has it already.
        """
        return self.read_state()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricsEvent(StepEvent):
    """A step's metrics can be read without holding up the step after it.

    Attributes:
      read_metrics: Fetches the metrics; only the first call of any hook takes time.
    """

    read_metrics: Callable[[], PyTree]

    @property
    def metrics(self) -> PyTree:
        """The step's metrics, as NumPy arrays on the host."""
        return self.read_metrics()


class Hook(Protocol):
    """A periodic effect: subclass it and override the methods that you need.

    Attributes:
      phase: Phase of the run while this hook has a state.
    """

    phase: Phase = "report"

    @property
    def should_stop(self) -> bool:
        """Whether the run must end after this step, as if its steps were done."""
        return False

    def on_state(self, event: StateEvent) -> None:
        """After each call of the step: its state may be read until this returns."""

    def on_metrics(self, event: MetricsEvent) -> None:
        """After each step, one call late or before a save: read its metrics or not."""

    def on_end(self, event: StateEvent) -> None:
        """Once, with the final state, if the run came to its end."""

    def close(self) -> None:
        """Once, also when a run that had begun failed: close files and threads."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a run that goes on from here, as plain JSON.

        It is saved after the `on_state` of a step, and is the same in all processes. A
        run with checkpoints calls it before its first step, too, to check that it is
        JSON.
        """
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state of a hook of this type: the first gets that of the first."""

    def flush(self) -> None:
        """Return when all that was written is safe; called from another thread."""


def checked_hooks(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    """Return the hooks of a run, in order.

    Raises:
      ArgumentError: `hooks` is not a list, or holds another object than a hook.
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
        if not all(hasattr(hook, name) for name in _HOOK_NAMES):
            raise ArgumentError(
                f"`hooks` must hold hooks only, got {hook!r}. Subclass "
                "`replicator.hooks.Hook`, or wrap a function: `Callback(fn, "
                "every(n_steps=1))`."
            )
    return listed


_HOOK_NAMES = tuple(name for name in vars(Hook) if not name.startswith("_"))
