"""Open the parts of a run for `Session`, in an order in which each can refuse it.

A run that goes back past a bad number opens everything anew: a resume within one
process.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from replicator.base.flat_tree import FlatTree, whole
from replicator.base.tracebacks import short_tracebacks
from replicator.base.types import PyTree
from replicator.distributed.same_everywhere import require_same_state
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.step.state import RunState
from replicator.hooks.hook_states import load_hooks
from replicator.hooks.protocol import Hook
from replicator.hooks.user_hooks import HookOfUser
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.placement import Placed
from replicator.inputs.skipped_batches import SkippedBatches
from replicator.monitoring.phases import Phases
from replicator.training.checkpoint_hook import (
    Resumed,
    SaveCheckpoints,
    find_start,
    open_store,
)
from replicator.training.evaluate_hook import (
    EvaluateEvery,
    EvaluationLeft,
    followed_number,
)
from replicator.training.loop import Loop, LoopResult, Step
from replicator.training.preemption.agreed_time import AgreedTime
from replicator.training.preemption.preemption import LeaveSaved, Preemption
from replicator.training.replica_check import first_comparison
from replicator.training.reports.records import Reports, open_reports
from replicator.training.run_spec import RunSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """Open parts of a run.

    Attributes:
      loop: State of the run between steps.
      batches: Input of the run; None if the loop has its own.
      resumed: Point at which it resumed.
      evaluation: Hook that evaluates; None for none.
      leaving: Hook that saves and leaves on request; None if the run is not saved.
    """

    loop: Loop
    batches: SkippedBatches | None
    resumed: Resumed
    evaluation: EvaluateEvery | None
    leaving: LeaveSaved | None

    def catch_up(self, phases: Phases) -> None:
        """Make the evaluation that the previous process left, and save its metrics.

        Raises:
          Preempted: A signal asked the run to stop: the evaluation is left once more.
        """
        event = self.loop.event_of_before
        if event is None or self.evaluation is None or self.leaving is None:
            return
        with self._left_with_an_evaluation(), phases.during("evaluate"):
            if self.evaluation.catch_up(event) and event.goes_on():
                phases.enter("save")
                self.leaving.saving.on_end(event)

    def end(self, stall_s: float) -> LoopResult:
        """End the run, unless it has left already, or leaves its last evaluation.

        Raises:
          Preempted: As `catch_up`.
          Exception: As `Loop.end`.
        """
        if self.leaving is None or not self.leaving.has_left:
            with self._left_with_an_evaluation():
                return self.loop.end(stall_s)
        return self.loop.leave()

    @contextlib.contextmanager
    def _left_with_an_evaluation(self) -> Iterator[None]:
        try:
            yield
        except EvaluationLeft:
            assert self.leaving is not None, "only a saved run leaves an evaluation"
            self.leaving.leave_saved()


def open_run(
    spec: RunSpec,
    *,
    preemption: Preemption | None,
    first_states: Sequence[Any],
    closers: list[Callable[[], None]],
) -> Opened:
    """Open a run at its last checkpoint, or at its beginning.

    Args:
      spec: The run.
      preemption: Hook of stop requests; None if the run takes none.
      first_states: First states of the user's hooks, for a run that goes back to its
        beginning.
      closers: Filled with the functions that close all parts, also if this fails
        half-way.
    """
    went_back, store = spec.recovery.went_back, None
    if spec.checkpointing is not None:
        store = open_store(spec)
        closers.append(store.close)
    with spec.phases.during("restore"):
        resumed = find_start(spec, store)
    require_same_state(spec.mesh, resumed.state)
    start_step = resumed.start_step
    if not went_back:
        _try_evaluation(spec, resumed)
    comparison = first_comparison(spec, resumed.state, step=start_step)
    reports = open_reports(spec, resumed)
    closers += [hook.close for hook in [*reports.hooks, *reports.after]]
    evaluation = _evaluation(spec, reports, preemption)
    wanted = (spec.recovery, evaluation, *map(HookOfUser, spec.hooks), comparison)
    saved_hooks = [hook for hook in wanted if hook is not None]
    load_hooks(reports.hooks, resumed.reports)
    load_hooks(saved_hooks, resumed.hooks)
    if went_back and not resumed.hooks:
        load_hooks(spec.hooks, first_states)  # back to the very beginning
    spec.recovery.resume_at(start_step)
    saving, leaving = None, None
    if store is not None:
        saving = SaveCheckpoints(
            spec,
            store,
            resumed=resumed,
            reports=reports.hooks,
            hooks=saved_hooks,
            evaluation=evaluation,
            comparison=comparison,
        )
        if preemption is not None:
            leaving = LeaveSaved(spec, preemption, saving, first_step=start_step)
    hooks = hooks_in_order(reports, saved_hooks, saving, leaving or preemption)
    batches = _input(spec, resumed, preemption, in_turn=lambda: loop.in_turn)
    # Close in hook order: checkpoints last, after all reports are flushed.
    closers[:] = [hook.close for hook in hooks]
    closers += [] if batches is None else [batches.close]
    loop = Loop(
        _loop_state(spec.step, resumed.state),
        plan=dataclasses.replace(spec.plan, start_step=start_step),
        hooks=hooks,
        report_bad=None if spec.recovery.ignores else spec.recovery.handle,
        phases=spec.phases,
        cut_at=resumed.position if resumed.was_cut else None,
        agreed_time=AgreedTime() if spec.together else None,
        show_state=_shown(spec, resumed),
        damage=_damage(spec.hooks),
    )
    closers.append(loop.close)
    opened = Opened(
        loop=loop,
        batches=batches,
        resumed=resumed,
        evaluation=evaluation,
        leaving=leaving,
    )
    opened.catch_up(spec.phases)
    return opened


def hooks_in_order(
    reports: Reports,
    saved_hooks: Sequence[Hook],
    saving: SaveCheckpoints | None,
    stopping: Hook | None,
) -> list[Hook]:
    """Return all hooks of a run, in the order in which each event calls them.

    1. Reports: compilations, the display, the metrics, before anything ends the run.
    2. Recovery runs next, so later hooks never see a step that is rolled back.
    3. Evaluation: its numbers are there for the user's hooks, and for ranking.
    4. The user's hooks; behind them copies of the state are compared.
    5. Saving: the states of all hooks before it are those after this step.
    6. Stopping: after the agreed last step the run is saved, or ends.
    7. The profiler and the journal of phases, which measure all hooks before them.

    Args:
      reports: Hooks of 1 and 7.
      saved_hooks: Hooks of 2, 3 and 4, whose states are in checkpoints.
      saving: Hook of 5; None if the run is not saved.
      stopping: Hook of 6; None if the run takes no stop requests.
    """
    ends = [hook for hook in (saving, stopping) if hook is not None]
    return [*reports.hooks, *saved_hooks, *ends, *reports.after]


def _try_evaluation(spec: RunSpec, resumed: Resumed) -> None:
    """Evaluate the first batch alone, to show errors before hours of steps."""
    has_ended = spec.plan.steps is not None and resumed.start_step >= spec.plan.steps
    if (wanted := spec.evaluating) is None or has_ended:
        return
    with spec.phases.during("evaluate"):
        one = InputOptions(steps=1)
        metrics = wanted.evaluate(spec.evaluation_of, resumed.state.user, inputs=one)
    if wanted.follow is not None:
        followed_number(metrics, wanted.follow.metric)


def _evaluation(
    spec: RunSpec, reports: Reports, preemption: Preemption | None
) -> EvaluateEvery | None:
    if (wanted := spec.evaluating) is None:
        return None

    def leave_if_asked() -> None:
        # A run that is not saved cannot repeat an evaluation that it left.
        if preemption is None or spec.checkpointing is None:
            return
        if preemption.leaves_evaluation():
            raise EvaluationLeft

    return EvaluateEvery(
        lambda state: wanted.evaluate(
            spec.evaluation_of, state, between=leave_if_asked
        ),
        wanted.when,
        writer=reports.writer,
        follow=wanted.follow,
        log=spec.log_once,
    )


def _input(
    spec: RunSpec,
    resumed: Resumed,
    preemption: Preemption | None,
    *,
    in_turn: Callable[[], bool],
) -> SkippedBatches | None:
    if spec.dataset is None:
        return None
    unasked = None
    if spec.plan.steps is not None and spec.step is not None:
        # As many calls as are left; a loop that skips batches asks for more. At least
        # one: errors of an input show even if no batch of it is used.
        calls_left = (spec.plan.steps - resumed.start_step) // spec.plan.steps_per_call
        unasked = max(calls_left, 1)

    def is_over() -> bool:
        # Not between a step and `after`: the update must be completed.
        ends = preemption is not None and preemption.ends_input()
        return ends and not in_turn()

    batches = open_input(
        spec.dataset,
        spec.layout,
        options=spec.reading,
        start=resumed.position,
        is_over=is_over,
        unasked=unasked,
    )
    return spec.recovery.watch(batches)


def _loop_state(step: Step | None, state: RunState) -> PyTree:
    """Return the state as the loop keeps it: steps of its own take the user's state."""
    if step is None:
        return state.user
    # A debug step takes it as it is.
    return FlatTree.of(state) if isinstance(step, CompiledStep) else state


def _damage(hooks: Sequence[Hook]) -> Callable[..., PyTree] | None:
    # A hook may damage the state on purpose (`testing/faults`).
    found = (getattr(hook, "damage_state", None) for hook in hooks)
    return next(filter(None, found), None)


def _shown(spec: RunSpec, resumed: Resumed) -> Callable[[PyTree, int], PyTree]:
    """Return the function from the loop's state to the state of the run."""
    if spec.step is not None:
        return lambda state, step: whole(state)
    began = resumed.state
    return lambda user, step: dataclasses.replace(
        began,
        # On the host: putting it on the devices would cost a transfer per step.
        step=np.asarray(step, np.int32),
        user=whole(user),
    )


class EndOfBatches(StopIteration):
    """The end of a session's own batches, distinct from that of other iterators."""


@short_tracebacks
class SessionBatches(Iterator[Placed]):
    """Batches that end with `EndOfBatches`, for loops that call `next` themselves.

    >>> list(SessionBatches(iter([])))
    []

    Args:
      batches: Batches of the run.
    """

    def __init__(self, batches: Iterator[Placed]) -> None:
        self._batches = batches

    def __next__(self) -> Placed:
        """Return the next batch.

        Raises:
          EndOfBatches: There is none.
        """
        try:
            return next(self._batches)
        except StopIteration:
            raise EndOfBatches from None
