"""Save a whole run, and go on from it: state, input, hooks, and what is in flight."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicator.base.types import PyTree
from replicator.checkpoint.disk import Disk
from replicator.checkpoint.reading import Restored
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore
from replicator.collectives.context.keys import RANDOM_STREAMS
from replicator.distributed.report_progress import report_progress
from replicator.engine.step.state import RunState
from replicator.errors import ArgumentError
from replicator.inputs.position import Position, position_from_json
from replicator.monitoring.pending_metrics import (
    PendingMetrics,
    in_flight_from_json,
    result_as_json,
    result_from_json,
)
from replicator.monitoring.run_record import describe_dataset, versions
from replicator.monitoring.writers.writer import named_numbers
from replicator.training.evaluate_hook import EvaluateEvery
from replicator.training.hooks.hook import Hook, MetricsEvent, StateEvent
from replicator.training.training import Training

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on.

    Attributes:
      state: The run's state.
      position: Where its input goes on.
      in_flight: Metrics that its hooks have not been shown.
      reports: The states of its reports.
      hooks: The states of its user's hooks.
      last_metrics: Of its last step, if it had come to its end; None if not.
      began: The seed that it began with, and what its dataset is.
    """

    state: RunState
    position: Position
    in_flight: PendingMetrics | None = None
    reports: Sequence[Any] = ()
    hooks: Sequence[Any] = ()
    last_metrics: PyTree = None
    began: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def start_step(self) -> int:
        """Updates that the state has behind it."""
        return int(self.state.step)

    @property
    def shown_steps(self) -> int:
        """Up to which step hooks have been shown metrics."""
        late = self.in_flight.steps if self.in_flight is not None else 0
        return self.start_step - late


class SaveCheckpoints(Hook):
    """Save the whole run at due steps, and at its end; the last of a run's hooks.

    Args:
      of: The run. Where it is known where it ends, the end saves that step.
      store: Open; closed with the run.
      resumed: Where the run goes on.
      reports: The run's own hooks, in this process.
      hooks: Those whose states are the same in all.
      evaluation: What the run evaluates by; None for nothing.
    """

    phase = "save"

    def __init__(
        self,
        of: Training,
        store: CheckpointStore,
        *,
        resumed: Resumed,
        reports: Sequence[Hook],
        hooks: Sequence[Hook],
        evaluation: EvaluateEvery | None,
    ) -> None:
        assert of.checkpointing is not None
        self._store = store
        self._trigger = of.checkpointing.when.trigger()
        self._reports = reports
        self._hooks = hooks
        self._last_step = of.plan.steps
        self._rank_by = of.checkpointing.retention.metric
        self._evaluation = evaluation
        self._about = {"strategy": of.arguments.get("strategy"), "began": resumed.began}
        self._tell = of.tell_alike
        self._told = store.counts
        # Written by the store's thread, before it counts the save; taken by the loop's.
        self._failure: Exception | None = None
        self._shown: MetricsEvent | None = None
        self._begun: int | None = None
        store.settle(resumed.shown_steps)

    def on_state(self, event: StateEvent) -> None:
        """Begin to save if due; the copy is made before the state is donated."""
        self._raise_failure()
        self._tell_outcome(event.step)
        self._require_ranked(event)
        if self._trigger.pulled(event) and event.step != self._last_step:
            # A state with bad numbers in it would be what a run goes back to.
            event.require_finite()
            if self._store.save_nowait(self._snapshot(event)):
                self._begun = event.step

    def on_metrics(self, event: MetricsEvent) -> None:
        """Remember the metrics: at the end they are the run's result."""
        self._shown = event
        self._store.settle(event.step)

    def on_end(self, event: StateEvent) -> None:
        """Save the last step, durably: now its metrics were shown, and hooks ended."""
        event.require_finite()
        self._require_ranked(event)
        if not self._is_saved(event):
            self._store.save(self._snapshot(event))
        self._tell_outcome(event.step)
        self._raise_failure()

    def close(self) -> None:
        """Wait for a save in flight, and give the directory back."""
        self._shown = None
        self._store.close()

    def _is_saved(self, event: StateEvent) -> bool:
        """Tell whether a step that is left in the midst of the loop was just saved."""
        if event.in_flight is None or self._begun != event.step:
            return False
        self._store.wait()
        return self._store.counts.last_step == event.step

    def _snapshot(self, event: StateEvent) -> Snapshot:
        position = event.position or Position()
        late = event.in_flight
        ended = self._shown if late is None else None
        metrics = {} if ended is None else named_numbers(ended.metrics)
        return Snapshot(
            step=event.step,
            arrays=event.state,
            meta={
                "position": position.as_json(),
                "reports": hook_states(self._reports),
                "hooks": hook_states(self._hooks),
                "last_metrics": ended and result_as_json(ended.metrics),
                **self._about,
                "versions": versions(),
                "random_streams": RANDOM_STREAMS,
            },
            own={"input": list(position.states), "checksums": position.checksums},
            late=self._late(late),
            metrics={**metrics, **self._found(event.step)},
            late_metrics=None if late is None else late.last_numbers,
        )

    def _found(self, step: int) -> Mapping[str, float]:
        return {} if self._evaluation is None else self._evaluation.numbers_of(step)

    def _require_ranked(self, event: StateEvent) -> None:
        """Refuse to rank by a number that is not there, once it is known which are."""
        if self._rank_by is None:
            return
        found = list(self._found(event.step))
        is_of_evaluation = self._rank_by.startswith("eval/")
        if self._evaluation is not None and not found and is_of_evaluation:
            return  # it may come yet
        if event.in_flight is not None:
            found += event.in_flight.names()
        elif self._shown is not None:
            found += named_numbers(self._shown.metrics)
        if self._rank_by not in found:
            names = ", ".join(map(repr, found))
            raise ArgumentError(
                "`metric` must be a number of the step or of the evaluation to rank "
                f"by, got {self._rank_by!r} and {names}. Use one of these."
            )
        self._rank_by = None

    def _late(self, in_flight: PendingMetrics | None) -> Callable[[], dict[str, Any]]:
        """Return what to wait for before the checkpoint counts."""

        def wait() -> dict[str, Any]:
            # What was told before this step is done again by nobody: it must be there.
            for hook in [*self._reports, *self._hooks]:
                try:
                    hook.flush()
                except Exception as failure:  # raised by the loop's next call
                    self._failure = self._failure or failure
            return {"in_flight": in_flight and in_flight.as_json()}

        return wait

    def _tell_outcome(self, step: int) -> None:
        """Tell of the newest commit, and of a failure, if that was not told."""
        before, self._told = self._told, self._store.counts
        now = self._told
        if now.saved > before.saved and now.last_step is not None:
            report_progress(now.last_step)
            self._tell("saved", step=now.last_step, seconds=now.last_save_s)
        if now.failed > before.failed:
            self._tell("save_failed", step=step, failed_in_a_row=now.failed_in_a_row)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def open_store(of: Training) -> CheckpointStore:
    """Open the directory of a run's checkpoints."""
    checkpoints = of.checkpointing
    assert checkpoints is not None, "asked for where a run is saved"
    # One hook may bring a disk, to break what is saved on purpose.
    disks = [getattr(hook, "disk", None) for hook in of.hooks]
    store = CheckpointStore(
        checkpoints.directory,
        policy=checkpoints.retention,
        disk=next((disk for disk in disks if isinstance(disk, Disk)), None),
        together=of.together,
    )
    return store.open()


def find_start(of: Training, store: CheckpointStore | None) -> Resumed:
    """Return where a run goes on: after what was saved last, or at its beginning.

    Args:
      of: The run; where seed or dataset are not those that it began with, that is said.
      store: Open; None for one that is not saved.

    Raises:
      CheckpointError: There is no checkpoint that is whole.
      CheckpointMismatchError: It is that of another model.
    """
    dataset = None if of.dataset is None else describe_dataset(of.dataset)
    began = {"seed": of.seed, "dataset": dataset}
    found, first = None, of.first.shapes
    if store is not None:
        found = store.restore(first, shardings=of.layout.state_shardings(first))
    if found is None:
        return Resumed(state=of.first.born(), position=Position(), began=began)
    if found.meta.get("random_streams") != RANDOM_STREAMS:
        _log.warning(
            "The checkpoint of step %d is from another version of replicator: from "
            "here on the random keys of steps, examples and replicas are others than "
            "the run would have had.",
            int(found.arrays.step),
        )
    saved = found.meta.get("began") or began
    for name in (name for name in began if began[name] != saved[name]):
        _log.warning(
            "`%s` is %s, and was %s when the run was saved: the run goes on with its "
            "old keys, at its place in the input. Choose another `checkpoint_dir` to "
            "begin anew.",
            *(name, began[name], saved[name]),
        )
    position = _position(found)
    late, last = found.meta.get("in_flight"), found.meta.get("last_metrics")
    return Resumed(
        state=found.arrays,
        position=position,
        in_flight=late and in_flight_from_json(late, position=position),
        reports=found.meta.get("reports", ()),
        hooks=found.meta.get("hooks", ()),
        last_metrics=None if last is None else result_from_json(last),
        began={**began, "seed": saved["seed"]},
    )


def hook_states(hooks: Sequence[Hook]) -> list[list[Any]]:
    """Return the name and the state of each hook, in order.

    Raises:
      ArgumentError: A state is no plain JSON; the hook is named.
    """
    return [[_name(hook), _state(hook)] for hook in hooks]


def _state(hook: Hook) -> Any:
    state = hook.state_dict()
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as failure:
        raise ArgumentError(
            f"`{_name(hook)}.state_dict` must return plain JSON, got what is not: "
            f"{failure}. Return finite numbers, words, lists and dicts of them."
        ) from failure


def load_hooks(hooks: Sequence[Hook], saved: Sequence[Any]) -> None:
    """Give each hook the state that one of its kind had in its place.

    Args:
      hooks: Those of the run that goes on.
      saved: From `hook_states`, of the run that was saved.
    """
    for place, hook in enumerate(hooks):
        name, state = saved[place] if place < len(saved) else (None, None)
        if name == _name(hook):
            if state is not None:
                hook.load_state(state)
        elif saved:
            _log.warning(
                "Hook %d is a `%s`, and was %s when the run was saved: it starts anew.",
                *(place, _name(hook), f"a `{name}`" if name else "none"),
            )


def _name(hook: Hook) -> str:
    return type(getattr(hook, "inner", hook)).__name__


def _position(found: Restored) -> Position:
    position = position_from_json(found.meta["position"])

    def told(name: str) -> list[Any]:
        each = [word for own in found.own for word in own.get(name, ())]
        # With one pipeline each process read all of it, and says the same.
        return each[:1] if position.num_pipelines == 1 else each

    return position_from_json(
        position.as_json() | {"states": told("input"), "checksums": told("checksums")}
    )
