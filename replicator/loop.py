"""Run a step over batches: the one place where plans and steps meet clock and input.

A turn of the loop pulls a batch, dispatches step t+1, and only then shows the metrics
of step t to the hooks, so the devices have work while the host reads. How many steps
may be in flight is the step's affair. Metrics stay on the devices until a hook asks for
them, or until `FiniteCheck` looks at them.

Not here: how a step is compiled, how batches get to the devices, what hooks do. Saving
and evaluating are hooks (`on_state`, `on_end`), never branches of this loop.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import jax
import numpy as np

from replicator.clock import Clock, SystemClock
from replicator.errors import ArgumentError, BatchError
from replicator.finite_check import FiniteCheck
from replicator.hooks import Hook, MetricsEvent, StateEvent
from replicator.progress import Progress, ProgressNumbers
from replicator.protocols import PyTree
from replicator.writers.multi import call_all


class Batch(Protocol):
    """What one call of the step takes.

    Attributes:
      value: The arrays, on the devices.
      examples: How many real examples they hold.
      steps: How many updates the call makes.
      position: Where the input is after them; hooks are told.
    """

    @property
    def value(self) -> PyTree: ...  # noqa: D102
    @property
    def examples(self) -> int: ...  # noqa: D102
    @property
    def steps(self) -> int: ...  # noqa: D102
    @property
    def position(self) -> Any: ...  # noqa: D102


Step: TypeAlias = Callable[[PyTree, Batch], tuple[PyTree, PyTree]]
"""`step(state, batch) -> (state, metrics)`: takes over `state`; may run ahead."""


class Batches(Protocol):
    """An iterator of batches that tells how long it let its consumer wait."""

    @property
    def stall_s(self) -> float: ...  # noqa: D102
    def __next__(self) -> Batch: ...
    def close(self) -> None: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopPlan:
    """How long to run, and how.

    Attributes:
      steps: Updates in all, those before `start_step` included; None runs until the
        input ends.
      start_step: Updates that the state has behind it.
      steps_per_call: Updates that one call of the step makes. Above 1, each metric has
        a leading axis of that size.
      on_nonfinite: Whether a NaN or infinite metric ends the run.

    Raises:
      ArgumentError: A number is out of range, or calls do not fit into `steps`.
    """

    steps: int | None
    start_step: int = 0
    steps_per_call: int = 1
    on_nonfinite: Literal["raise", "ignore"] = "raise"

    def __post_init__(self) -> None:
        if self.start_step < 0:
            raise ArgumentError(
                f"`start_step` must be at least 0, got {self.start_step}. "
                "Leave it out for a state that has no step behind it."
            )
        if self.steps is not None and self.steps < 0:
            raise ArgumentError(
                f"`steps` must be at least 0, got {self.steps}. "
                "Pass `steps=None` to run until the input ends."
            )
        if self.steps_per_call < 1:
            raise ArgumentError(
                f"`steps_per_call` must be at least 1, got {self.steps_per_call}. "
                "Leave it out for one step a call."
            )
        if self.on_nonfinite not in ("raise", "ignore"):
            raise ArgumentError(
                "`on_nonfinite` must be 'raise' or 'ignore', "
                f"got {self.on_nonfinite!r}. Leave it out to raise."
            )
        self._require_whole_calls()

    def _require_whole_calls(self) -> None:
        # A last call of fewer steps would be another program, compiled at the very end.
        n, left = self.steps_per_call, (self.steps or 0) - self.start_step
        if self.steps is None or left <= 0 or left % n == 0:
            return
        lower, upper = self.steps - left % n, self.steps - left % n + n
        remedy = f"{lower} or {upper}" if lower > self.start_step else f"{upper}"
        after = f" from step {self.start_step} on" if self.start_step else ""
        raise ArgumentError(
            f"`steps` must be a multiple of `steps_per_call`{after}, "
            f"got {self.steps} for {n}. Use {remedy}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopResult:
    """What is left when a run has ended.

    Attributes:
      state: The state after the last step.
      step: Updates done, those before `start_step` included.
      examples: Real examples that this run saw.
      metrics: The last step's: Python numbers, and NumPy arrays where a metric is no
        scalar. None if no step was run.
      progress: Time and rates at the end; None if no step was run.
    """

    state: PyTree
    step: int
    examples: int
    metrics: PyTree
    progress: ProgressNumbers | None


def run_loop(
    step: Step,
    state: PyTree,
    batches: Batches,
    *,
    plan: LoopPlan,
    hooks: Sequence[Hook] = (),
    clock: Clock | None = None,
) -> LoopResult:
    """Call `step` until the plan's steps are done or the input ends.

    Hooks and `batches` are closed in every case, also on an interrupt; what they raise
    while closing after another error is noted on that error.

    Args:
      step: Makes `batch.steps` updates.
      state: The first state; donated.
      batches: What to train on; owned by the loop from now on.
      plan: How long, and how.
      hooks: What happens besides, in this order at each moment.
      clock: Where time comes from.

    Raises:
      ArgumentError: The input ended before `plan.steps`.
      BatchError: A batch holds more updates than are left.
      NonFiniteError: A metric is NaN or infinite, and `plan` does not ignore it.
      Exception: Whatever `step`, `batches` or a hook raised.
    """
    with _closed_at_the_end([*(hook.close for hook in hooks), batches.close]):
        run = _Run(state, plan, hooks, clock or SystemClock())
        while plan.steps is None or run.step < plan.steps:
            batch = next(batches, None)
            if batch is None:
                run.require_end_of_plan()
                break
            run.dispatch(step, batch, batches.stall_s)
            if any(hook.should_stop for hook in hooks):
                break
        return run.end(batches.stall_s)


@contextmanager
def _closed_at_the_end(closers: list[Callable[[], None]]):
    try:
        yield
    except BaseException as failure:
        try:
            call_all(closers)
        except Exception as problem:
            failure.add_note(f"Closing failed, too: {problem!r}")
        raise
    call_all(closers)


class _Run:
    """The state of a loop between two turns."""

    def __init__(
        self, state: PyTree, plan: LoopPlan, hooks: Sequence[Hook], clock: Clock
    ):
        self.state = state
        self.step = plan.start_step
        self._plan = plan
        self._hooks = hooks
        self._examples = 0
        self._progress = Progress(clock, steps=plan.steps)
        self._finite = FiniteCheck() if plan.on_nonfinite == "raise" else None
        self._newest: _Call | None = None

    def dispatch(self, step: Step, batch: Batch, stall_s: float) -> None:
        self._require_room(batch)
        self.state, metrics = step(self.state, batch)
        self.step += batch.steps
        self._examples += batch.examples
        progress = self._measure(stall_s)
        self._show_metrics()
        self._newest = _Call(
            last_step=self.step,
            steps=batch.steps,
            stacked=self._plan.steps_per_call > 1,
            examples_before=self._examples - batch.examples,
            examples=batch.examples,
            progress=progress,
            metrics=metrics,
            position=batch.position,
        )
        for hook in self._hooks:
            hook.on_state(self._newest.state_event(self.state))

    def require_end_of_plan(self) -> None:
        """Refuse an input that ended while there are steps to do."""
        if self._plan.steps is None or self.step >= self._plan.steps:
            return
        self._show_metrics()
        if self._finite is not None:
            self._finite.check()
        raise ArgumentError(
            f"`dataset` must last for {self._plan.steps} steps, got its end after step "
            f"{self.step}. Repeat it, or pass `steps=None` to run until it ends."
        )

    def end(self, stall_s: float) -> LoopResult:
        self._show_metrics()
        if self._finite is not None:
            self._finite.check()
        if (call := self._newest) is None:
            return self._result(None, None)
        call.progress = self._measure(stall_s)  # now that the last step is done
        for hook in self._hooks:
            hook.on_end(call.state_event(self.state))
        metrics = jax.tree.map(_as_python, call.read(call.steps - 1))
        return self._result(metrics, call.progress)

    def _measure(self, stall_s: float) -> ProgressNumbers:
        return self._progress.update(
            step=self.step, examples=self._examples, stall_s=stall_s
        )

    def _show_metrics(self) -> None:
        if (call := self._newest) is None:
            return
        for event in call.metrics_events():
            for hook in self._hooks:
                hook.on_metrics(event)
        if self._finite is not None:
            self._finite.admit(
                call.metrics, first_step=call.first_step, stacked=call.stacked
            )
            if call.was_read:
                self._finite.check()

    def _result(self, metrics: PyTree, progress: ProgressNumbers | None) -> LoopResult:
        return LoopResult(
            state=self.state,
            step=self.step,
            examples=self._examples,
            metrics=metrics,
            progress=progress,
        )

    def _require_room(self, batch: Batch) -> None:
        wanted = self._plan.steps
        if wanted is not None and self.step + batch.steps > wanted:
            raise BatchError(
                f"`steps_per_call` batches must be whole, got one of {batch.steps} "
                f"steps with {wanted - self.step} left. Repeat the dataset."
            )


@dataclasses.dataclass(kw_only=True, slots=True)
class _Call:
    """One dispatch, whose metrics stay on the devices until somebody asks."""

    last_step: int
    steps: int
    stacked: bool
    examples_before: int
    examples: int
    progress: ProgressNumbers
    metrics: PyTree
    position: Any
    was_read: bool = False

    @property
    def first_step(self) -> int:
        return self.last_step - self.steps + 1

    def read(self, index: int) -> PyTree:
        """Return the metrics of the call's step number `index`, on the host."""
        if not self.was_read:
            self.metrics = jax.tree.map(np.asarray, jax.device_get(self.metrics))
            self.was_read = True
        if not self.stacked:
            return self.metrics
        return jax.tree.map(lambda leaf: leaf[index], self.metrics)

    def state_event(self, state: PyTree) -> StateEvent:
        return StateEvent(
            step=self.last_step,
            advanced=self.steps,
            examples=self.examples_before + self.examples,
            progress=self.progress,
            state=state,
            position=self.position,
        )

    def metrics_events(self) -> list[MetricsEvent]:
        return [
            MetricsEvent(
                step=self.first_step + index,
                advanced=1,
                examples=self.examples_before
                + self.examples * (index + 1) // self.steps,
                progress=self.progress,
                read_metrics=partial(self.read, index),
            )
            for index in range(self.steps)
        ]


def _as_python(leaf: np.ndarray) -> PyTree:
    return leaf if np.ndim(leaf) else leaf.item()
