"""Run a step over batches: the one place where plans and steps meet clock and input.

An iteration takes a batch, dispatches step t+1, and only then shows the metrics of step
t to the hooks, so the devices have work while the host reads. The step itself bounds
the number of steps in flight. Metrics stay on the devices until a hook or `FiniteCheck`
reads them.

`Session` drives the loop, for `run` and for users' loops. Compiling the step, placing
batches and the work of hooks are elsewhere; saving and evaluating are hooks
(`on_state`, `on_end`), never branches of this loop.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from replicator.base.flat_tree import whole
from replicator.base.types import PyTree
from replicator.engine.run_ahead import is_under_way
from replicator.errors import ArgumentError, BatchError
from replicator.hooks.protocol import Hook, StateEvent
from replicator.inputs.placement import Placed
from replicator.monitoring.phases import Phases
from replicator.monitoring.progress import Progress, ProgressNumbers
from replicator.training.best_metric import BestSoFar
from replicator.training.dispatched_step import DispatchedCall, joined
from replicator.training.nonfinite.finite_check import FiniteCheck
from replicator.training.nonfinite.policy import BadNumber
from replicator.training.options import LoopPlan
from replicator.training.preemption.agreed_time import AgreedTime
from replicator.writers.writer import check_names

Step: TypeAlias = Callable[[PyTree, Placed], tuple[PyTree, PyTree]]
"""`step(state, batch) -> (state, metrics)`: donates `state`; may run ahead."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopResult:
    """Result of a run.

    Attributes:
      state: The state after the last step.
      step: Updates made, those of earlier runs included.
      examples: Real examples that this run used.
      metrics: Metrics of the last step: Python numbers, and NumPy arrays for metrics
        that are not scalars. None if no step was ever run.
      progress: Time and rates at the end; None if no step was run.
      evaluation: Metrics of the last evaluation; None if there was none. If the run had
        ended before, this and `metrics` are those of that end, as nested dicts, without
        arrays of over 10,000 numbers.
      best: The best evaluation, if a number of it is followed.
    """

    state: PyTree
    step: int
    examples: int
    metrics: PyTree
    progress: ProgressNumbers | None
    evaluation: Mapping[str, PyTree] | None = None
    best: BestSoFar | None = None


class Loop:
    """The loop of a run: its state, and the metrics that were not shown yet.

    The caller takes batches from `next` and hands each to `dispatch`, until there is
    none; then it calls `end`. A step that the caller made itself is handed in by
    `after`.

    Attributes:
      in_turn: True between a step and `after`: the state is incomplete and must not be
        saved or shown.

    Args:
      state: The first state; donated. A `FlatTree` for a step that returns one: hooks
        and the result see the tree.
      plan: Number of steps, and of steps per call.
      hooks: Hooks, called in this order at each event.
      phases: Records the phase of the run; its clock is the loop's.
      cut_at: Position of the input in a run that was saved at `plan.start_step` before
        its end; None for a run that begins, or had ended.
      agreed_time: Clock shared by all processes, for hooks that are due by time.
      report_bad: Called with each NaN or infinity among the metrics; None checks none.
      show_state: Returns the state after a step as hooks and the result see it.
      damage: `damage(state, before, step)` returns another state after the updates from
        `before` to `step`, for tests of faults; None leaves states alone.
    """

    def __init__(
        self,
        state: PyTree,
        *,
        plan: LoopPlan,
        hooks: Sequence[Hook] = (),
        phases: Phases | None = None,
        cut_at: Any = None,
        agreed_time: AgreedTime | None = None,
        report_bad: Callable[[BadNumber], None] | None = None,
        show_state: Callable[[PyTree, int], PyTree] = lambda state, step: whole(state),
        damage: Callable[[PyTree, int, int], PyTree] | None = None,
    ):
        self.state = state
        self.in_turn = False
        self._show_state = show_state
        self._damage = damage
        self.step = plan.start_step
        self.metrics: PyTree = None  # of the last call, never read here
        self._plan = plan
        self._last_step = plan.steps
        self._hooks = hooks
        self._examples = 0
        self._phases = phases or Phases()
        self._progress = Progress(self._phases.clock, steps=plan.steps)
        self._finite = FiniteCheck(report_bad) if report_bad is not None else None
        self._agreed_time = agreed_time
        self._looked_s: float | None = None
        self._newest: DispatchedCall | None = None
        # A hook that wants to stop by metrics that were shown early does so after the
        # next step, as always: a run ends at the same step wherever it is saved or cut.
        self._not_yet: set[int] = set()
        if cut_at is not None:
            self._newest = self._of_before(cut_at)
            self._not_yet = self._stopping()

    def _of_before(self, position: Any) -> DispatchedCall:
        """Return the last call before the cut, for `on_end` if no step follows."""
        time_s = self._agreed_s(self._phases.clock.now_s())
        numbers = {"step": self.step, "steps": self._plan.steps}
        return DispatchedCall(
            last_step=self.step,
            progress=ProgressNumbers(**numbers, time_s=time_s),
            position=position,
            phases=self._phases,
            was_shown=True,
        )

    @property
    def event_of_before(self) -> StateEvent | None:
        """Event of the restored state of a run that was cut, until the next step."""
        call = self._newest
        return None if call is None else self._state_event(call, ended=False)

    @property
    def goes_on(self) -> bool:
        """True if steps are left and no hook wants to stop."""
        if self._last_step is not None and self.step >= self._last_step:
            return False
        return self._stopping() <= self._not_yet

    def _stopping(self) -> set[int]:
        return {id(hook) for hook in self._hooks if hook.should_stop}

    def next(self, batches: Iterator[Placed]) -> Placed | None:
        """Return the next batch; None if no step or no batch is left."""
        # Checked first: a resumed run may have reached its end before.
        if not self.goes_on:
            return None
        self._phases.enter("input")
        return next(batches, None)

    def require_room(self, steps: int) -> None:
        """Refuse more steps than are left.

        Raises:
          BatchError: Fewer than `steps` steps are left.
        """
        last = self._last_step
        if last is None or self.step + steps <= last:
            return
        if self.step >= last:
            raise BatchError(
                f"`steps` must leave a step to be made, got {last} that are all done. "
                "End the loop where `session.batches()` or `session.steps()` end."
            )
        raise BatchError(
            f"`steps_per_call` batches must be whole, got one of {steps} steps with "
            f"{last - self.step} left. Repeat the dataset."
        )

    def begin_step(self) -> None:
        """Enter the phase of a step."""
        hidden = is_under_way(self.metrics)
        self._phases.enter("step", step=self.step, hidden=hidden)

    def dispatch(
        self,
        step: Step,
        batch: Placed,
        stall_s: float,
        *,
        beside: Mapping[str, PyTree] | None = None,
    ) -> None:
        """Dispatch a step, and complete it by `after`.

        Args:
          step: Step that makes `batch.steps` updates.
          batch: Its batch.
          stall_s: Seconds spent waiting for batches so far.
          beside: More metrics, of the host.

        Raises:
          ArgumentError: `beside` cannot be joined to the step's metrics.
          BatchError: As `require_room`.
          NonFiniteError: A metric is NaN or infinite, and that ends the run.
          Exception: Any error of `step` or of a hook.
        """
        self.require_room(batch.steps)
        self.begin_step()
        state, metrics = step(self.state, batch)
        if beside:
            lead = (batch.steps,) if self._plan.steps_per_call > 1 else ()
            metrics = joined(metrics, beside, lead=lead)
        self.after(
            state,
            metrics,
            steps=batch.steps,
            examples=batch.examples,
            position=batch.position,
            stall_s=stall_s,
        )

    def after(
        self,
        state: PyTree,
        metrics: PyTree,
        *,
        steps: int = 1,
        examples: int = 0,
        position: Any = None,
        stall_s: float = 0.0,
    ) -> None:
        """Show hooks the state of a dispatched step, and the metrics of the one before.

        Args:
          state: State after the step.
          metrics: Metrics of the step.
          steps: Updates that it makes.
          examples: Real examples that it used.
          position: Position of the input after it.
          stall_s: Seconds spent waiting for batches so far.
        """
        if self.metrics is None:
            check_names(metrics)
        self.state, self.metrics, self.in_turn = state, metrics, False
        self.step += steps
        if self._damage is not None:
            self.state = self._damage(state, self.step - steps, self.step)
        self._not_yet = set()
        self._examples += examples
        progress = self._measure(stall_s)
        self._show_metrics()
        self._newest = DispatchedCall(
            last_step=self.step,
            steps=steps,
            stacked=self._plan.steps_per_call > 1,
            examples_before=self._examples - examples,
            examples=examples,
            progress=progress,
            metrics=metrics,
            position=position,
            phases=self._phases,
        )
        event = self._state_event(self._newest, ended=False)
        phase = None
        for hook in self._hooks:
            if hook.phase != phase:
                phase = hook.phase
                self._phases.enter(phase, step=self.step)
            hook.on_state(event)

    def require_end_of_plan(self) -> None:
        """Refuse an input that ended while steps are left.

        Raises:
          ArgumentError: Steps are left.
          NonFiniteError: As `dispatch`.
        """
        if self._plan.steps is None or self.step >= self._plan.steps:
            return
        self._show_metrics()
        self._check_finite()
        raise ArgumentError(
            f"`dataset` must last for {self._plan.steps} steps, got its end after step "
            f"{self.step}. Repeat it, or pass `steps=None` to run until it ends."
        )

    def end(self, stall_s: float) -> LoopResult:
        """Show hooks the last metrics and the last state, and return the result.

        Raises:
          NonFiniteError: As `dispatch`.
          Exception: Any error of a hook.
        """
        self._show_metrics()
        self._check_finite()
        if (call := self._newest) is not None:
            call.progress = self._measure(stall_s)  # now that the last step is done
            for hook in self._hooks:
                self._phases.enter(hook.phase)
                hook.on_end(self._state_event(call, ended=True))
        return self.leave()

    def leave(self) -> LoopResult:
        """Return the result as it is, without calling hooks; no step follows."""
        self._last_step = self.step
        call = self._newest
        return LoopResult(
            state=self._show_state(self.state, self.step),
            step=self.step,
            examples=self._examples,
            metrics=call and call.last_metrics(),
            progress=call and call.progress,
        )

    def close(self) -> None:
        """Drop the state and the hooks, so that no reference cycle keeps a state."""
        self.state = self.metrics = self._newest = self._finite = None
        self._hooks = ()

    def _state_event(self, call: DispatchedCall, *, ended: bool) -> StateEvent:
        return StateEvent(
            step=call.last_step,
            advanced=call.steps,
            examples=call.examples_before + call.examples,
            progress=call.progress,
            # An event that held the state would free its arrays where a hook drops the
            # event: in that hook's phase, which is not part of the step.
            read_state=partial(self._state_after, self.step),
            position=call.position,
            ended=ended,
            goes_on=lambda: self.goes_on,
            show_metrics=self._show_now,
        )

    def _state_after(self, step: int) -> PyTree:
        if self.in_turn or step != self.step or self.state is None:
            now = f"{self.step + 1} begun" if self.in_turn else f"{self.step} done"
            now = "the end of the run" if self.state is None else f"step {now}"
            raise ArgumentError(
                "`event.state` must be read before the step after it, got "
                f"{now} for the state after step {step}. Read it in "
                "`on_state`, and keep a copy."
            )
        return self._show_state(self.state, step)

    def _measure(self, stall_s: float) -> ProgressNumbers:
        numbers = self._progress.update(
            step=self.step, examples=self._examples, stall_s=stall_s
        )
        return dataclasses.replace(numbers, time_s=self._agreed_s(numbers.time_s))

    def _agreed_s(self, now_s: float) -> float:
        """Return the time that all processes use after this step."""
        agreed = self._agreed_time
        return now_s if agreed is None else agreed.at(self.step, now_s)

    def _show_metrics(self) -> None:
        if (call := self._newest) is None or call.was_shown:
            return
        call.was_shown = True
        self._phases.enter("report")
        for event in call.metrics_events():
            for hook in self._hooks:
                hook.on_metrics(event)
        if self._finite is not None:
            # Checking metrics may wait for the devices.
            self._phases.enter("step", hidden=is_under_way(self.metrics))
            self._finite.admit(
                call.metrics, first_step=call.first_step, stacked=call.stacked
            )
        if self._is_time_to_look(call):
            self._check_finite()

    def _is_time_to_look(self, call: DispatchedCall) -> bool:
        """Return whether to look for bad numbers now, the same in all processes."""
        if self._agreed_time is None:
            return call.was_read  # nothing to wait for
        # Processes read metrics at different steps. One that went back, or ended, alone
        # would leave the others in a collective.
        before_s, self._looked_s = self._looked_s, call.progress.time_s
        return call.progress.time_s != before_s

    def _show_now(self) -> None:
        """Show the newest metrics and check all so far, before a state is saved."""
        with self._phases.during("report"):
            if self._newest is not None and not self._newest.was_shown:
                wanted = self._stopping()
                self._show_metrics()
                self._not_yet = self._stopping() - wanted
            self._check_finite()

    def _check_finite(self) -> None:
        self._phases.enter("step")
        if self._finite is not None:
            self._finite.check()
