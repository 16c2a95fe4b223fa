"""Make a run, from the newest checkpoint on, as often as it goes back to one.

An attempt opens what a run needs (checkpoints, reports, input) in the order in which
each can refuse, and hands all of it to the loop. A run that goes back past a bad number
opens everything anew: that is a resume in one process.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
from jax.sharding import Mesh

from replicator.base.flat_tree import FlatTree
from replicator.base.mesh import spans_processes
from replicator.base.types import Dataset, PyTree
from replicator.checkpoint.store import CheckpointStore
from replicator.distributed.same_everywhere import require_same_state
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.layout import Layout
from replicator.engine.memory_errors import is_out_of_memory
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.state import FirstState
from replicator.hooks import Every, Hook
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.position import Position
from replicator.inputs.skipped_batches import require_rereadable
from replicator.monitoring.events import EventLog
from replicator.monitoring.phases import Phases
from replicator.monitoring.run_record import describe_dataset
from replicator.training.best_metric import Follow
from replicator.training.checkpoint_hook import (
    Checkpoints,
    Resumed,
    SaveCheckpoints,
    hook_states,
    load_hooks,
    open_store,
    resume,
)
from replicator.training.closing import closed_on_failure
from replicator.training.evaluate_hook import EvaluateEvery, followed_number
from replicator.training.guards import guarded
from replicator.training.loop import LoopPlan, LoopResult, Step, run_loop
from replicator.training.nonfinite.rollback import Recovery
from replicator.training.postmortem.examine import (
    RecordsFailure,
    Reopened,
    examine,
    is_met_by_all,
)
from replicator.training.preemption.agreed_time import AgreedTime
from replicator.training.preemption.hook import LeaveSaved, Preemption
from replicator.training.reports.records import Records, Reports, open_reports
from replicator.training.user_hooks import HookOfUser
from replicator.training.watchdog import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluations:
    """What a run evaluates, and when.

    Attributes:
      evaluate: Returns metrics of a user's state; reads as `inputs=` says.
      when: At which steps; the last one is evaluated, too.
      follow: The number that tells the best step, and when to give up.
    """

    evaluate: Callable[..., Mapping[str, PyTree]]
    when: Every
    follow: Follow | None = None

    def try_out(self, state: PyTree) -> None:
        """Evaluate the first batch alone: what is wrong shows before hours of steps.

        Args:
          state: The user's, as the run begins or goes on with it.

        Raises:
          ArgumentError: `follow` names no number of the evaluation.
          Exception: Whatever an evaluation raises.
        """
        metrics = self.evaluate(state, inputs=InputOptions(steps=1))
        if self.follow is not None:
            followed_number(metrics, self.follow.metric)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """All that a run is made of; nothing of it is open yet.

    Attributes:
      step: Works on a `RunState`.
      first: The first state, for a run that was not saved.
      dataset: What to train on.
      layout: How replicas lie on devices.
      plan: How long.
      reading: How the dataset is read.
      records: What is told.
      checkpoints: Where the run is saved; None saves nothing.
      evaluations: What is evaluated; None for nothing.
      events: This process's journal of the run; None for none.
      recovery: What is done about bad numbers.
      one_replica: The step of one replica, to be written down where it fails.
      hooks: The user's own.
      phases: Where it notes what it is doing.
      limits: How long each of that may take.
    """

    step: Step
    first: FirstState
    dataset: Dataset
    layout: Layout
    plan: LoopPlan
    reading: InputOptions
    records: Records
    checkpoints: Checkpoints | None
    evaluations: Evaluations | None
    events: EventLog | None
    recovery: Recovery
    one_replica: KeyedStep
    hooks: Sequence[Hook]
    phases: Phases
    limits: Limits

    @property
    def mesh(self) -> Mesh:
        """The devices of the run."""
        return self.layout.mesh


class Attempts:
    """A run, from the newest checkpoint on, as often as it goes back to one."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._events = training.events
        # Of what all processes do alike, one of them tells.
        alike = spans_processes(training.mesh) and jax.process_index() > 0
        self._tell_alike = teller(None if alike else training.events)
        self._recovery = training.recovery
        self._step = RecordsFailure(training.step)
        goes_back = training.recovery.policy.goes_back
        self._first_states = hook_states(training.hooks) if goes_back else []

    def run(self) -> LoopResult:
        """Run to the end, or until it is to go back."""
        of = self._training
        with guarded(
            of.phases,
            limits=of.limits.for_input(of.reading.timeout_s),
            directory=of.records.directory,
            together=spans_processes(of.mesh),
            saved=of.checkpoints is not None,
            tell=teller(self._events),
        ) as preemption:
            return self._run(preemption)

    @contextmanager
    def examined(self) -> Iterator[None]:
        """Write down what a step that fails was given, for `replicator replay`."""
        of = self._training
        try:
            yield
        except Exception as failure:
            # What a step lacked may come to light where its metrics are read.
            if is_out_of_memory(failure) and isinstance(of.step, CompiledStep):
                raise of.step.explained(failure) from failure
            dispatched = of.phases.current.step
            bad_step = self._step.bad_step(failure, dispatched=dispatched)
            meets = not spans_processes(of.mesh) or is_met_by_all(failure)
            if meets and of.records.directory is not None and bad_step is not None:
                self._examine(of.records.directory, failure, bad_step)
            raise

    def _run(self, preemption: Preemption | None) -> LoopResult:
        # The loop closes what it was handed; until then, what is open is closed here.
        with closed_on_failure() as opened:
            return self._go_on(preemption, opened)

    def _go_on(
        self, preemption: Preemption | None, opened: list[Callable[[], None]]
    ) -> LoopResult:
        of = self._training
        store = self._open_store() if of.checkpoints is not None else None
        if store is not None:
            opened.append(store.close)
        with of.phases.during("restore"):
            resumed = self._resume(store)
        require_same_state(of.mesh, resumed.state)
        if of.evaluations is not None and self._has_steps_ahead(resumed):
            with of.phases.during("evaluate"):
                of.evaluations.try_out(resumed.state.user)
        reports = open_reports(
            of.records,
            resumed,
            step=of.step,
            mesh=of.mesh,
            phases=of.phases,
            events=self._events,
            is_fresh=resumed.start_step == 0 and not self._recovery.went_back,
        )
        opened += [hook.close for hook in [*reports.hooks, *reports.after]]
        evaluation, hooks = self._hooks(reports)
        load_hooks(reports.hooks, resumed.reports)
        load_hooks(hooks, resumed.hooks)
        if self._recovery.went_back and not resumed.hooks:
            load_hooks(of.hooks, self._first_states)  # back to the very beginning
        self._recovery.come_back(resumed.start_step)
        plan = dataclasses.replace(
            of.plan,
            start_step=resumed.start_step,
            on_nonfinite="ignore" if self._recovery.ignores else "raise",
        )
        saving = self._saving(store, preemption, resumed, reports, hooks)
        batches = self._input(resumed)
        opened.clear()
        result = run_loop(
            self._step,
            _handed_on(of.step, resumed.state),
            batches,
            plan=plan,
            hooks=[*reports.hooks, *hooks, *saving, *reports.after],
            tell=self._recovery.tell,
            phases=of.phases,
            in_flight=resumed.in_flight,
            agreed_time=AgreedTime() if spans_processes(of.mesh) else None,
        )
        if preemption is not None:
            preemption.leave_if_asked(result.step, tell=teller(self._events))
        ran = result.metrics is not None
        return dataclasses.replace(
            result,
            state=result.state.user,
            metrics=result.metrics if ran else resumed.last_metrics,
            evaluation=evaluation and evaluation.metrics,
            best=evaluation and evaluation.best,
        )

    def _has_steps_ahead(self, resumed: Resumed) -> bool:
        """Tell whether this begins a run, or a part of one, that is not done yet."""
        steps = self._training.plan.steps
        is_done = steps is not None and resumed.start_step >= steps
        return not is_done and not self._recovery.went_back

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: they hold what went bad."""
        with self._open_store() as store:
            store.discard_after(step)

    def _open_store(self) -> CheckpointStore:
        of = self._training
        assert of.checkpoints is not None
        return open_store(of.checkpoints, of.hooks, of.layout)

    def _resume(self, store: CheckpointStore | None) -> Resumed:
        of = self._training
        began = {"seed": of.records.seed, "dataset": describe_dataset(of.dataset)}
        found = None
        if store is not None:
            found = resume(store, of.first.shapes, of.layout, began)
        if found is None:
            return Resumed(state=of.first.born(), position=Position(), began=began)
        return found

    def _input(self, resumed: Resumed):
        of = self._training
        reading, left_out = of.reading, 0
        if of.plan.steps is not None:
            left_out = self._recovery.steps_left_out(
                batches_read=resumed.position.batches,
                steps_per_call=of.plan.steps_per_call,
            )
            # At least one: an input that is never asked need not be empty.
            left = max(of.plan.steps - resumed.start_step + left_out, 1)
            reading = dataclasses.replace(reading, steps=left)
        batches = open_input(
            of.dataset, of.layout, options=reading, start=resumed.position
        )
        return self._recovery.watch(batches, start_step=resumed.start_step)

    def _examine(
        self, directory: str | os.PathLike[str], failure: Exception, bad_step: int
    ) -> None:
        of, together = self._training, spans_processes(self._training.mesh)
        watched = guarded(
            of.phases,
            limits=of.limits,
            directory=directory,
            together=together,
            tell=teller(self._events),
        )
        with watched, of.phases.during("end"):
            found = examine(
                directory,
                failure,
                bad_step=bad_step,
                step=of.step,
                one_replica=of.one_replica,
                reopen=self._reopen,
                about={"arguments": of.records.arguments, "seed": of.records.seed},
                together=together,
            )
        if found is not None:
            failure.add_note(f"To look at the step: replicator replay {found}")

    def _reopen(self) -> Reopened:
        """Return where the run could go on, to come to a step once more."""
        of = self._training
        require_rereadable(of.dataset, why="a post-mortem bundle")
        resumed = None
        if of.checkpoints is not None:
            with self._open_store() as store:
                resumed = self._resume(store)
        resumed = resumed or self._resume(None)
        reading = dataclasses.replace(of.reading, steps=None)
        batches = open_input(
            of.dataset, of.layout, options=reading, start=resumed.position
        )
        watched = self._recovery.watch(batches, start_step=resumed.start_step)
        return resumed.state, watched, resumed.start_step

    def _hooks(self, reports: Reports) -> tuple[EvaluateEvery | None, list[Hook]]:
        """Return the run's evaluation, and with it all hooks of the user."""
        for_user: list[Hook] = [HookOfUser(hook) for hook in self._training.hooks]
        if (wanted := self._training.evaluations) is None:
            return None, [self._recovery, *for_user]
        evaluation = EvaluateEvery(
            wanted.evaluate,
            wanted.when,
            writer=reports.writer,
            follow=wanted.follow,
            tell=self._tell_alike,
        )
        return evaluation, [self._recovery, evaluation, *for_user]

    def _saving(
        self,
        store: CheckpointStore | None,
        preemption: Preemption | None,
        resumed: Resumed,
        reports: Reports,
        hooks: Sequence[Hook],
    ) -> list[Hook]:
        of = self._training
        if store is None or of.checkpoints is None:
            return []
        strategy = of.records.arguments.get("strategy")
        found = (hook.numbers_of for hook in hooks if isinstance(hook, EvaluateEvery))
        saving = SaveCheckpoints(
            store,
            of.checkpoints.when,
            reports=reports.hooks,
            hooks=hooks,
            last_step=of.plan.steps,
            rank_by=of.checkpoints.retention.metric,
            evaluated=next(found, None),
            about={"strategy": strategy, "began": resumed.began},
            tell=self._tell_alike,
        )
        if preemption is None:
            return [saving]
        leaving = LeaveSaved(
            preemption,
            saving.on_end,
            phases=of.phases,
            first_step=resumed.start_step,
            last_step=of.plan.steps,
            tell=teller(self._events),
        )
        return [saving, leaving]


def _handed_on(step: Step, state: PyTree) -> PyTree:
    """Return the state as a loop hands it to `step`: debugging shows it as it is."""
    return FlatTree.of(state) if isinstance(step, CompiledStep) else state


def teller(events: EventLog | None) -> Callable[..., None]:
    """Return what writes into a journal; into none if there is none."""
    return (lambda kind, /, **fields: None) if events is None else events.write
