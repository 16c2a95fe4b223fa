"""Run a step over batches: the one place where plans and steps meet clock and input.

A turn of the loop pulls a batch, dispatches step t+1, and only then shows the metrics
of step t to the hooks, so the devices have work while the host reads. How many steps
may be in flight is the step's affair. Metrics stay on the devices until a hook asks for
them, or until `FiniteCheck` looks at them.

Not here: how a step is compiled, how batches get to the devices, what hooks do. Saving
and evaluating are hooks (`on_state`, `on_end`), never branches of this loop.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import jax
import numpy as np

from replicator.base.flat_tree import whole
from replicator.base.types import PyTree
from replicator.engine.run_ahead import is_under_way
from replicator.errors import ArgumentError, BatchError
from replicator.hooks import Hook, StateEvent
from replicator.monitoring.pending_metrics import PendingMetrics
from replicator.monitoring.phases import Phases
from replicator.monitoring.progress import Progress, ProgressNumbers, first_numbers
from replicator.training.best_metric import BestSoFar
from replicator.training.closing import closed_at_the_end
from replicator.training.dispatched_step import DispatchedCall
from replicator.training.nonfinite.finite_check import FiniteCheck
from replicator.training.nonfinite.policy import BadNumber
from replicator.training.preemption.agreed_time import AgreedTime


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
        if isinstance(self.steps, np.integer):
            object.__setattr__(self, "steps", int(self.steps))
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if self.steps is not None and not whole:
            raise ArgumentError(
                f"`steps` must be a whole number, got {self.steps!r}. "
                "Pass an `int`, or `steps=None` to run until the input ends."
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
        scalar. None if no step was ever run.
      progress: Time and rates at the end; None if no step was run.
      evaluation: What the last evaluation found; None if there was none. This and
        `metrics` of a run that had ended before are those that it ended with, as nested
        dicts, without arrays of over 10,000 numbers.
      best: The best evaluation, where a number of it is followed.
    """

    state: PyTree
    step: int
    examples: int
    metrics: PyTree
    progress: ProgressNumbers | None
    evaluation: Mapping[str, PyTree] | None = None
    best: BestSoFar | None = None


def run_loop(
    step: Step,
    state: PyTree,
    batches: Batches,
    *,
    plan: LoopPlan,
    hooks: Sequence[Hook] = (),
    phases: Phases | None = None,
    in_flight: PendingMetrics | None = None,
    agreed_time: AgreedTime | None = None,
    tell: Callable[[BadNumber], None] | None = None,
) -> LoopResult:
    """Call `step` until the plan's steps are done or the input ends.

    Hooks and `batches` are closed in every case, also on an interrupt; what they raise
    while closing after another error is noted on that error.

    Args:
      step: Makes `batch.steps` updates.
      state: The first state; donated. A `FlatTree` for a step that returns one: hooks
        and the result see the tree.
      batches: What to train on; owned by the loop from now on.
      plan: How long, and how.
      hooks: What happens besides, in this order at each moment.
      phases: Where it notes what it is doing; its clock is the loop's.
      in_flight: What hooks were not shown of the steps before `plan.start_step`.
      tell: Takes bad numbers, unless `plan` ignores them; raises them by default.
      agreed_time: What makes hooks due by the clock due in all processes at once.

    Raises:
      ArgumentError: The input ended before `plan.steps`.
      BatchError: A batch holds more updates than are left.
      NonFiniteError: A metric is NaN or infinite, and `plan` does not ignore it.
      Exception: Whatever `step`, `batches` or a hook raised.
    """
    with closed_at_the_end([*(hook.close for hook in hooks), batches.close]):
        phases = phases or Phases()
        run = _Run(state, plan, hooks, phases, in_flight, agreed_time, tell)
        while plan.steps is None or run.step < plan.steps:
            # First of all: a run that goes on may have come to its end before.
            if any(hook.should_stop for hook in hooks):
                break
            phases.enter("input")
            batch = next(batches, None)
            if batch is None:
                run.require_end_of_plan()
                break
            run.dispatch(step, batch, batches.stall_s)
        result = run.end(batches.stall_s)
        phases.enter("end")
    return result


class _Run:
    """The state of a loop between two turns."""

    def __init__(
        self,
        state: PyTree,
        plan: LoopPlan,
        hooks: Sequence[Hook],
        phases: Phases,
        in_flight: PendingMetrics | None,
        agreed_time: AgreedTime | None,
        tell: Callable[[BadNumber], None] | None,
    ):
        self.state = state
        self.step = plan.start_step
        self._plan = plan
        self._hooks = hooks
        self._examples = 0
        self._phases = phases
        self._progress = Progress(phases.clock, steps=plan.steps)
        self._finite = FiniteCheck(tell) if plan.on_nonfinite == "raise" else None
        self._agreed_time = agreed_time
        self._looked_s: float | None = None
        self._newest: DispatchedCall | None = None
        self._dispatched: PyTree = None  # metrics of the last call, never read here
        if in_flight is not None:
            now_s = phases.clock.now_s()
            if agreed_time is not None:
                now_s = agreed_time.at(plan.start_step, now_s)
            self._newest = DispatchedCall(
                last_step=plan.start_step,
                steps=in_flight.steps,
                stacked=in_flight.stacked,
                examples_before=0,
                examples=0,
                progress=first_numbers(plan.start_step, plan.steps, now_s),
                metrics=in_flight.metrics,
                position=in_flight.position,
                phases=phases,
            )

    def dispatch(self, step: Step, batch: Batch, stall_s: float) -> None:
        self._require_room(batch)
        hidden = is_under_way(self._dispatched)
        self._phases.enter("step", step=self.step, hidden=hidden)
        self.state, metrics = step(self.state, batch)
        self._dispatched = metrics
        self.step += batch.steps
        self._examples += batch.examples
        progress = self._measure(stall_s)
        self._show_metrics()
        self._newest = DispatchedCall(
            last_step=self.step,
            steps=batch.steps,
            stacked=self._plan.steps_per_call > 1,
            examples_before=self._examples - batch.examples,
            examples=batch.examples,
            progress=progress,
            metrics=metrics,
            position=batch.position,
            phases=self._phases,
        )
        event = self._state_event(self._newest, shown=False)
        phase = None
        for hook in self._hooks:
            if hook.phase != phase:
                phase = hook.phase
                self._phases.enter(phase, step=self.step)
            hook.on_state(event)

    def require_end_of_plan(self) -> None:
        """Refuse an input that ended while there are steps to do."""
        if self._plan.steps is None or self.step >= self._plan.steps:
            return
        self._show_metrics()
        self._check_finite()
        raise ArgumentError(
            f"`dataset` must last for {self._plan.steps} steps, got its end after step "
            f"{self.step}. Repeat it, or pass `steps=None` to run until it ends."
        )

    def end(self, stall_s: float) -> LoopResult:
        self._show_metrics()
        self._check_finite()
        if (call := self._newest) is None:
            return self._result(None, None)
        call.progress = self._measure(stall_s)  # now that the last step is done
        for hook in self._hooks:
            self._phases.enter(hook.phase)
            hook.on_end(self._state_event(call, shown=True))
        metrics = jax.tree.map(_as_python, call.read(call.steps - 1))
        return self._result(metrics, call.progress)

    def _state_event(self, call: DispatchedCall, *, shown: bool) -> StateEvent:
        # An event that held the state would have its arrays freed, all of them, where a
        # hook lets go of the event: in that hook's phase, which is no part of the step.
        return call.state_event(
            partial(self._state_after, self.step), shown=shown, look=self._look
        )

    def _state_after(self, step: int) -> PyTree:
        if step != self.step:
            raise ArgumentError(
                "`event.state` must be read before the step after it, got step "
                f"{self.step} done for the state after step {step}. Read it in "
                "`on_state`, and keep a copy."
            )
        return whole(self.state)

    def _measure(self, stall_s: float) -> ProgressNumbers:
        numbers = self._progress.update(
            step=self.step, examples=self._examples, stall_s=stall_s
        )
        if self._agreed_time is None:
            return numbers
        # The time that all processes go by after this step.
        agreed_s = self._agreed_time.at(self.step, numbers.time_s)
        return dataclasses.replace(numbers, time_s=agreed_s)

    def _show_metrics(self) -> None:
        if (call := self._newest) is None:
            return
        self._phases.enter("report")
        for event in call.metrics_events():
            for hook in self._hooks:
                hook.on_metrics(event)
        self._admit(call)
        if self._is_time_to_look(call):
            self._check_finite()

    def _is_time_to_look(self, call: DispatchedCall) -> bool:
        """Tell whether to look for bad numbers now, the same in all processes."""
        if self._agreed_time is None:
            return call.was_read  # then there is nothing to wait for
        # Who reads metrics, and when, differs between processes. One that went back, or
        # ended, alone would leave the others in a collective.
        before_s, self._looked_s = self._looked_s, call.progress.time_s
        return call.progress.time_s != before_s

    def _admit(self, call: DispatchedCall) -> None:
        if self._finite is None or call.was_admitted:
            return
        # To look at metrics is to wait for the devices.
        self._phases.enter("step", hidden=is_under_way(self._dispatched))
        self._finite.admit(
            call.metrics, first_step=call.first_step, stacked=call.stacked
        )
        call.was_admitted = True

    def _look(self) -> None:
        """Look at all metrics so far, for a state that must be good."""
        if self._newest is not None:
            self._admit(self._newest)
        with self._phases.during("step"):
            self._check_finite()

    def _check_finite(self) -> None:
        self._phases.enter("step")
        if self._finite is not None:
            self._finite.check()

    def _result(self, metrics: PyTree, progress: ProgressNumbers | None) -> LoopResult:
        return LoopResult(
            state=whole(self.state),
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


def _as_python(leaf: np.ndarray) -> PyTree:
    return leaf if np.ndim(leaf) else leaf.item()
