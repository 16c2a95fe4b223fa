"""Open what a run needs, in the order in which each can refuse: what `Session` drives.

A run that goes back past a bad number opens everything anew: that is a resume in one
process.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from replicator.base.flat_tree import FlatTree, whole
from replicator.base.types import PyTree
from replicator.distributed.same_everywhere import (
    require_same_state,
)
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
from replicator.training.reports.records import Reports, open_reports
from replicator.training.run_spec import RunSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """What one opening of a run has open.

    Attributes:
      loop: Its state between turns.
      batches: Its input; None where a loop has its own.
      resumed: Where it goes on.
      evaluation: What it evaluates by; None for nothing.
      leaving: What leaves it when it is asked to stop; None if it is not saved.
    """

    loop: Loop
    batches: SkippedBatches | None
    resumed: Resumed
    evaluation: EvaluateEvery | None
    leaving: LeaveSaved | None

    def catch_up(self, phases: Phases) -> None:
        """Make the evaluation that the run before has left, and save what it found.

        Raises:
          Preempted: Somebody asked the run to stop: it is left once more.
        """
        event = self.loop.event_of_before
        if event is None or self.evaluation is None or self.leaving is None:
            return
        with self._left_with_an_evaluation(), phases.during("evaluate"):
            if self.evaluation.catch_up(event) and event.goes_on():
                phases.enter("save")
                self.leaving.saving.on_end(event)

    def end(self, stall_s: float) -> LoopResult:
        """Make the end of the run, unless it has left, or leaves its last evaluation.

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
            assert self.leaving is not None, "else nobody leaves an evaluation"
            self.leaving.leave_asked()


def open_run(
    spec: RunSpec,
    *,
    preemption: Preemption | None,
    first_states: Sequence[Any],
    closers: list[Callable[[], None]],
) -> Opened:
    """Open a run where it was saved last, or at its beginning.

    Args:
      spec: What it is made of.
      preemption: Hears who asks it to stop; None if nobody is to be heard.
      first_states: Of the user's hooks, should it go back to its very beginning.
      closers: Takes what closes all that is open, also if this fails half-way.
    """
    went_back, store = spec.recovery.went_back, None
    if spec.checkpointing is not None:
        store = open_store(spec)
        closers.append(store.close)
    with spec.phases.during("restore"):
        resumed = find_start(spec, store)
    require_same_state(spec.mesh, resumed.state)
    start_step = resumed.start_step
    if not went_back and (spec.plan.steps is None or start_step < spec.plan.steps):
        _try_evaluation(spec, resumed.state.user)
    reports = open_reports(spec, resumed)
    closers += [hook.close for hook in [*reports.hooks, *reports.after]]
    evaluation = _evaluation(spec, reports, preemption)
    saved_hooks = [
        spec.recovery,
        *([evaluation] if evaluation is not None else ()),
        *(HookOfUser(hook) for hook in spec.hooks),
    ]
    load_hooks(reports.hooks, resumed.reports)
    load_hooks(saved_hooks, resumed.hooks)
    if went_back and not resumed.hooks:
        load_hooks(spec.hooks, first_states)  # back to the very beginning
    spec.recovery.come_back(start_step)
    saving, leaving = None, None
    if store is not None:
        saving = SaveCheckpoints(
            spec,
            store,
            resumed=resumed,
            reports=reports.hooks,
            hooks=saved_hooks,
            evaluation=evaluation,
        )
        if preemption is not None:
            leaving = LeaveSaved(spec, preemption, saving, first_step=start_step)
    hooks = hooks_in_order(reports, saved_hooks, saving, leaving or preemption)
    batches = _input(spec, resumed, preemption, in_turn=lambda: loop.in_turn)
    # From here on in this order: what is saved last waits for what is told before.
    closers[:] = [hook.close for hook in hooks]
    closers += [] if batches is None else [batches.close]
    loop = Loop(
        _handed_on(spec.step, resumed.state),
        plan=dataclasses.replace(spec.plan, start_step=start_step),
        hooks=hooks,
        tell=None if spec.recovery.ignores else spec.recovery.tell,
        phases=spec.phases,
        cut_at=resumed.position if resumed.was_cut else None,
        agreed_time=AgreedTime() if spec.together else None,
        show_state=_shown(spec, resumed),
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
    """Return all hooks of a run, in the order in which each moment calls them.

    1. Reports: compilations, the display, the metrics. What ends a run is told before.
    2. Recovery: who comes after it sees no step that the run goes back from.
    3. Evaluation: its numbers are there for the user's hooks, and to rank by.
    4. The user's hooks.
    5. Saving: the states of all before it are those after this step.
    6. Stopping: after a step that is asked to be the last, the run is saved, or ends.
    7. The profiler and the journal of phases: the time of all before them counts.

    Args:
      reports: 1 and 7.
      saved_hooks: 2, 3 and 4: their states are in a checkpoint.
      saving: 5; None if the run is not saved.
      stopping: 6; None if nobody can ask.
    """
    ends = [hook for hook in (saving, stopping) if hook is not None]
    return [*reports.hooks, *saved_hooks, *ends, *reports.after]


def _try_evaluation(spec: RunSpec, user: PyTree) -> None:
    """Evaluate the first batch alone: what is wrong shows before hours of steps."""
    if (wanted := spec.evaluating) is None:
        return
    with spec.phases.during("evaluate"):
        one = InputOptions(steps=1)
        metrics = wanted.found_by(spec.evaluation_of, user, inputs=one)
    if wanted.follow is not None:
        followed_number(metrics, wanted.follow.metric)


def _evaluation(
    spec: RunSpec, reports: Reports, preemption: Preemption | None
) -> EvaluateEvery | None:
    if (wanted := spec.evaluating) is None:
        return None

    def leave_if_asked() -> None:
        # Of a run that is not saved nobody could make again what is left.
        if preemption is None or spec.checkpointing is None:
            return
        if preemption.leaves_evaluation():
            raise EvaluationLeft

    return EvaluateEvery(
        lambda state: wanted.found_by(
            spec.evaluation_of, state, between=leave_if_asked
        ),
        wanted.when,
        writer=reports.writer,
        follow=wanted.follow,
        tell=spec.tell_alike,
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
        # one: what is wrong with an input shows also where it is never asked.
        calls_left = (spec.plan.steps - resumed.start_step) // spec.plan.steps_per_call
        unasked = max(calls_left, 1)

    def is_over() -> bool:
        # Not where a turn has made a step: it must come to its end.
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


def _handed_on(step: Step | None, state: RunState) -> PyTree:
    """Return the state as a loop keeps it: steps of its own know the user's alone."""
    if step is None:
        return state.user
    # Debugging shows it as it is.
    return FlatTree.of(state) if isinstance(step, CompiledStep) else state


def _shown(spec: RunSpec, resumed: Resumed) -> Callable[[PyTree, int], PyTree]:
    """Return what makes the state of a run out of what its loop keeps."""
    if spec.step is not None:
        return lambda state, step: whole(state)
    began = resumed.state
    return lambda user, step: dataclasses.replace(
        began,
        # On the host: to put it on the devices would be a transfer for each step.
        step=np.asarray(step, np.int32),
        user=whole(user),
    )


class EndOfBatches(StopIteration):
    """The end of a session's own batches, and of nobody else's."""


class Batches(Iterator[Placed]):
    """Batches whose end is known as theirs, also where a turn's `next` meets it.

    Args:
      batches: Them.
    """

    def __init__(self, batches: Iterator[Placed]) -> None:
        self._batches = batches

    def __next__(self) -> Placed:
        """Return the next one.

        Raises:
          EndOfBatches: There is none.
        """
        try:
            return next(self._batches)
        except StopIteration:
            raise EndOfBatches from None
