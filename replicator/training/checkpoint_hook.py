"""Save a whole run and resume it: state, input position, hooks and reports."""

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from replicator.base.types import PyTree
from replicator.checkpoint.disk import Disk
from replicator.checkpoint.reading import Restored
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore
from replicator.collectives.context.keys import RANDOM_STREAMS
from replicator.distributed.report_progress import report_progress
from replicator.engine.step.state import RunState
from replicator.errors import ArgumentError
from replicator.hooks.hook_states import hook_states
from replicator.hooks.protocol import Hook, MetricsEvent, StateEvent
from replicator.inputs.position import Position, position_from_json
from replicator.monitoring.result_json import result_as_json, result_from_json
from replicator.monitoring.run_record import describe_dataset, versions
from replicator.training.evaluate_hook import EvaluateEvery
from replicator.training.replica_check import ReplicaCheck
from replicator.training.run_spec import RunSpec
from replicator.writers.writer import named_numbers

_log = logging.getLogger(__name__)


class Began(NamedTuple):
    """Seed and dataset that a run began with; a checkpoint holds them as JSON."""

    seed: int
    dataset: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
    """Point at which a run resumes.

    Attributes:
      began: Seed and dataset that the run began with.
      state: State of the run.
      position: Position of the input.
      was_cut: Whether the run was saved before its last step.
      source: "disk", or "memory" for copies in launchers.
      reports: States of the run's own hooks.
      hooks: States of the user's hooks.
      last_metrics: Metrics of the last step, without large arrays; None if not known.
    """

    began: Began
    state: RunState
    position: Position
    was_cut: bool = False
    source: str = "disk"
    reports: Sequence[Any] = ()
    hooks: Sequence[Any] = ()
    last_metrics: PyTree = None

    @property
    def start_step(self) -> int:
        """Updates made so far."""
        return int(self.state.step)


class SaveCheckpoints(Hook):
    """Save the whole run at due steps, and at its end; the last of a run's hooks.

    Args:
      spec: The run.
      store: An open store; closed with the run.
      resumed: Point at which the run resumed.
      reports: The run's own hooks, in this process.
      hooks: Hooks whose states are the same in all processes.
      evaluation: The run's evaluation; None for none.
      comparison: Comparison of copies before each save; None for none.
    """

    phase = "save"

    def __init__(
        self,
        spec: RunSpec,
        store: CheckpointStore,
        *,
        resumed: Resumed,
        reports: Sequence[Hook],
        hooks: Sequence[Hook],
        evaluation: EvaluateEvery | None,
        comparison: ReplicaCheck | None = None,
    ) -> None:
        assert spec.checkpointing is not None
        self._store = store
        self._trigger = spec.checkpointing.when.trigger()
        copies = spec.checkpointing.copies or spec.checkpointing.when
        self._copy_trigger = copies.trigger()  # pulled only where copies are made
        self._safe_step = 0  # the last that was reported
        # Held while hooks flush: the threads that save and that copy may both ask.
        self._flushing = threading.Lock()
        self._reports = reports
        self._hooks = hooks
        self._copy = spec.checkpointing.copy
        self._ranks_by = spec.checkpointing.retention.metric
        self._is_known = self._ranks_by is None  # that there is such a number
        self._evaluation = evaluation
        self._comparison = comparison
        self._about = {
            "began": resumed.began._asdict(),
            "choice": _decision(spec.arguments.get("choice")),
            **_settings(spec),
        }
        self._log = spec.log_once
        self._logged = store.counts
        # Written by the store's thread before it counts the save; read and cleared by
        # the loop's thread. One reference, replaced whole: it needs no lock.
        self._failure: Exception | None = None
        last_metrics = resumed.last_metrics
        self._read_metrics: Callable[[], PyTree] = lambda: last_metrics
        self._begun: int | None = None

    def on_state(self, event: StateEvent) -> None:
        """Begin to save if due; the copy is made before the state is donated."""
        self._raise_failure()
        self._log_outcome(event.step)
        copies = self._store.copies
        if copies and self._copy_trigger.pulled(event) and event.goes_on():
            event.show_metrics()  # first, as below
            copies.save_nowait(self._snapshot(event))
        # After the last step `on_end` saves, with what hooks do at the end.
        if self._trigger.pulled(event) and event.goes_on():
            # Shown first, so that bad numbers raise before they are saved; and metrics
            # can be large: those that were shown need not be kept in memory.
            event.show_metrics()
            if self._ranks_by in self._found(event.step):
                # This step may be the best: wait for the save before it. If that takes
                # too long, this save is left out, which is logged.
                with contextlib.suppress(TimeoutError):
                    self._store.wait()
            if self._store.save_nowait(self._snapshot(event)):
                self._begun = event.step
            else:
                self._log("save_left_out", step=event.step)

    def on_metrics(self, event: MetricsEvent) -> None:
        """Remember the metrics: at the end they are the run's result."""
        self._read_metrics = event.read_metrics
        self._require_ranked(event.step)

    def on_end(self, event: StateEvent) -> None:
        """Save the last step durably, after its metrics were shown and hooks ended."""
        event.show_metrics()
        self._require_ranked(event.step)
        if not self._is_saved(event):
            self._store.save(self._snapshot(event))
        if self._store.copies is not None:
            self._store.copies.drop(above=-1)  # the disk has a later step than they
        self._log_outcome(event.step)
        self._raise_failure()

    def close(self) -> None:
        """Wait for a save in flight, and release the directory."""
        self._read_metrics = lambda: None
        self._store.close()

    def _is_saved(self, event: StateEvent) -> bool:
        """Return whether a step at which the loop is left early was just saved."""
        if event.ended or self._begun != event.step:
            return False
        self._store.wait()
        return self._store.counts.last_step == event.step

    def _snapshot(self, event: StateEvent) -> Snapshot:
        if self._comparison is not None:
            self._comparison.check(event)
        position = event.position or Position()
        return Snapshot(
            step=event.step,
            arrays=event.state,
            meta={
                "position": position.as_json(),
                "reports": hook_states(self._reports),
                "hooks": hook_states(self._hooks),
                "ended": event.ended,
                **self._about,
                "versions": versions(),
                "random_streams": RANDOM_STREAMS,
            },
            own={"input": list(position.states), "checksums": position.checksums},
            late=partial(self._late, self._read_metrics()),
            metrics=self._numbers(event.step),
        )

    def _numbers(self, step: int) -> dict[str, float]:
        return {**self._found(step), **named_numbers(self._read_metrics())}

    def _found(self, step: int) -> Mapping[str, float]:
        return {} if self._evaluation is None else self._evaluation.numbers_of(step)

    def _require_ranked(self, step: int) -> None:
        """Refuse to rank by a missing number, once all names are known."""
        if self._ranks_by is None or self._is_known:
            return
        is_of_evaluation = self._ranks_by.startswith("eval/")
        if self._evaluation is not None and is_of_evaluation and not self._found(step):
            return  # not evaluated yet
        found = self._numbers(step)
        if self._ranks_by not in found:
            names = ", ".join(map(repr, found))
            raise ArgumentError(
                "`metric` must be a number of the step or of the evaluation to rank "
                f"by, got {self._ranks_by!r} and {names}. Use one of these."
            )
        self._is_known = True

    def _late(self, metrics: PyTree) -> dict[str, Any]:
        """Flush reports up to this step: a resumed run does not repeat them."""
        with self._flushing:
            for hook in [*self._reports, *self._hooks]:
                try:
                    hook.flush()
                except Exception as failure:  # raised by the loop's next call
                    self._failure = self._failure or failure
        return {"last_metrics": None if metrics is None else result_as_json(metrics)}

    def _log_outcome(self, step: int) -> None:
        """Log the newest commit and the newest failure, if not logged yet."""
        before, self._logged = self._logged, self._store.counts
        now = self._logged
        copied = None if self._store.copies is None else self._store.copies.last_step
        safe = max(now.last_step or 0, copied or 0)
        if safe > self._safe_step:
            self._safe_step = safe
            report_progress(safe)
        if now.saved > before.saved and now.last_step is not None:
            self._log(
                "saved",
                step=now.last_step,
                seconds=now.last_save_s,
                copy=self._copy,
            )
        if now.failed > before.failed:
            self._log("save_failed", step=step, failed_in_a_row=now.failed_in_a_row)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def open_store(spec: RunSpec) -> CheckpointStore:
    """Open the directory of a run's checkpoints."""
    checkpoints = spec.checkpointing
    assert checkpoints is not None, "called only for a run that is saved"
    # A hook may bring a disk, to break saved files on purpose.
    disks = [getattr(hook, "disk", None) for hook in spec.hooks]
    store = CheckpointStore(
        checkpoints.directory,
        retention=checkpoints.retention,
        copy=checkpoints.copy,
        disk=next((disk for disk in disks if isinstance(disk, Disk)), None),
        together=spec.together,
        copies=checkpoints.copies is not None,
    )
    return store.open()


def find_start(spec: RunSpec, store: CheckpointStore | None) -> Resumed:
    """Return the point at which a run resumes: its last checkpoint, or the beginning.

    Args:
      spec: The run; a seed or dataset that differs from the saved one is logged.
      store: An open store; None for a run that is not saved.

    Raises:
      CheckpointError: No checkpoint is whole.
      CheckpointMismatchError: The checkpoint is that of another model.
    """
    dataset = None if spec.dataset is None else describe_dataset(spec.dataset)
    began = Began(seed=spec.seed, dataset=dataset)
    found, first = None, spec.first.shapes
    if store is not None:
        found = store.restore(first, shardings=spec.layout.state_shardings(first))
    if found is None:
        return Resumed(state=spec.first.born(), position=Position(), began=began)
    if found.meta.get("random_streams") != RANDOM_STREAMS:
        _log.warning(
            "The checkpoint of step %d is from another version of replicator: from "
            "here on the random keys of steps, examples and replicas differ from those "
            "of that version.",
            int(found.arrays.step),
        )
    now = began._asdict()
    saved = found.meta.get("began") or now
    for name in (name for name in now if now[name] != saved[name]):
        _log.warning(
            "`%s` is %s, and was %s when the run was saved: the run goes on with its "
            "old keys, at its place in the input. Choose another `checkpoint_dir` to "
            "begin anew.",
            *(name, now[name], saved[name]),
        )
    last = found.meta.get("last_metrics")
    reports, hooks = (found.meta.get(kind, ()) for kind in ("reports", "hooks"))
    _warn_of_changes(_settings(spec), found.meta)
    return Resumed(
        state=found.arrays,
        source=found.source,
        position=_position(found),
        # Before 0.3 only a run that had ended left its last metrics.
        was_cut=not found.meta.get("ended", last is not None),
        reports=reports,
        hooks=hooks,
        last_metrics=None if last is None else result_from_json(last),
        began=began._replace(seed=Began(**saved).seed),
    )


def _settings(spec: RunSpec) -> dict[str, Any]:
    """Return settings that may change when a run resumes."""
    names = ("strategy", "accumulate", "steps_per_call", "steps")
    return {name: spec.arguments.get(name) for name in names}


def _decision(choice: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what was decided, without what was found out on the way."""
    if choice is None:
        return None
    return {name: value for name, value in choice.items() if name != "candidates"}


def _of_strategy(settings: Mapping[str, Any]) -> dict[str, Any]:
    strategy = settings.get("strategy") or {}
    return {f"strategy.{name}": value for name, value in strategy.items()}


def _warn_of_changes(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    now, saved = ({**each, **_of_strategy(each)} for each in (now, saved))
    changed = [
        f"`{name}` {json.dumps(now[name])} (it was {json.dumps(saved[name])})"
        for name in now
        if name != "strategy" and name in saved and saved[name] != now[name]
    ]
    if changed:
        _log.warning("The run goes on with another %s.", ", ".join(changed))


def _position(found: Restored) -> Position:
    position = position_from_json(found.meta["position"])

    def saved(name: str) -> list[Any]:
        each = [entry for own in found.own for entry in own.get(name, ())]
        # If one pipeline was read, or a position was saved as it was restored, each
        # process has saved all entries.
        return each[: position.num_pipelines]

    return position_from_json(
        position.as_json() | {"states": saved("input"), "checksums": saved("checksums")}
    )
