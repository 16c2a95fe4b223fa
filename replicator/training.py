"""Run a compiled step, from the last checkpoint if there is one, and keep records.

It opens what a run needs (input, writers, checkpoints) in the order in which each can
refuse, hands all of it to the loop, and gives the user back the user's state.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from replicator.checkpoint.retention import Retention
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore
from replicator.display import make_display
from replicator.hooks import Every, Hook, Report, StateEvent, WriteMetrics, every
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.position import Position, position_from_json
from replicator.loop import LoopPlan, LoopResult, Step, run_loop
from replicator.protocols import Dataset
from replicator.run_record import set_aside, write_run_record
from replicator.state import RunState, state_shardings
from replicator.writers.directory import directory_writer
from replicator.writers.jsonl import drop_after


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """What a run tells, and where.

    Attributes:
      directory: Where metrics and `run.json` go; None for nowhere.
      write_every: Steps between written metrics.
      display: Whether progress is shown on standard error.
      seed: The run's seed, to be written down.
      arguments: The run's arguments, likewise.
    """

    directory: str | os.PathLike[str] | None
    write_every: int
    display: bool
    seed: int
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where and when a run is saved.

    Attributes:
      directory: Holds the checkpoints of this run and of no other.
      when: At which steps; the last step is saved, too.
      retention: Which of them stay.
    """

    directory: str | os.PathLike[str]
    when: Every
    retention: Retention


class SaveCheckpoints(Hook):
    """Save the whole run at due steps, and at its end.

    Args:
      store: Open; closed with the run.
      when: At which steps.
    """

    def __init__(self, store: CheckpointStore, when: Every) -> None:
        self._store = store
        self._trigger = when.trigger()
        self._saved_step: int | None = None

    def on_state(self, event: StateEvent) -> None:
        """Begin to save if due; the copy is made before the state is donated."""
        if self._trigger.pulled(event) and self._store.save_nowait(_snapshot(event)):
            self._saved_step = event.step

    def on_end(self, event: StateEvent) -> None:
        """Save the last step, durably."""
        self._store.wait()
        if self._saved_step != event.step:
            self._store.save(_snapshot(event))

    def close(self) -> None:
        """Wait for a save in flight, and give the directory back."""
        self._store.close()


def train(
    step: Step,
    state: RunState,
    dataset: Dataset,
    *,
    mesh: Mesh,
    plan: LoopPlan,
    reading: InputOptions,
    records: Records,
    checkpoints: Checkpoints | None,
    hooks: Sequence[Hook],
) -> LoopResult:
    """Run `step` until the plan's steps are done, from wherever the run was saved.

    Args:
      step: Works on a `RunState`.
      state: The first state; replaced by the saved one if there is any.
      dataset: What to train on.
      mesh: The replicas.
      plan: How long.
      reading: How the dataset is read.
      records: What is told.
      checkpoints: Where the run is saved; None saves nothing.
      hooks: The user's own.

    Returns:
      The loop's result, with the user's state.
    """
    position, saving = Position(), []
    if checkpoints is not None:
        store = CheckpointStore(checkpoints.directory, policy=checkpoints.retention)
        store.open()
        saving = [SaveCheckpoints(store, checkpoints.when)]
        state, position = _restored(store, state, mesh)
    start_step = int(state.step)
    reports = _open_records(records, start_step)
    if plan.steps is not None:
        # At least one: an input that is never asked need not be empty.
        left = max(plan.steps - start_step, 1)
        reading = dataclasses.replace(reading, steps=left)
    result = run_loop(
        step,
        state,
        open_input(dataset, mesh, options=reading, start=position),
        plan=dataclasses.replace(plan, start_step=start_step),
        hooks=[*saving, *reports, *map(_ForUser, hooks)],
    )
    return dataclasses.replace(result, state=result.state.user)


class _ForUser(Hook):
    """Show a user's hook the user's state, not the run's."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.on_metrics = hook.on_metrics
        self.close = hook.close

    @property
    def should_stop(self) -> bool:
        return self._hook.should_stop

    def on_state(self, event: StateEvent) -> None:
        self._hook.on_state(dataclasses.replace(event, state=event.state.user))

    def on_end(self, event: StateEvent) -> None:
        self._hook.on_end(dataclasses.replace(event, state=event.state.user))


def _snapshot(event: StateEvent) -> Snapshot:
    position = event.position or Position()
    return Snapshot(
        step=event.step, arrays=event.state, meta={"position": position.as_json()}
    )


def _restored(
    store: CheckpointStore, state: RunState, mesh: Mesh
) -> tuple[RunState, Position]:
    """Return what was saved last, or the first state and position."""
    try:
        found = store.restore(state, shardings=state_shardings(state, mesh))
    except BaseException:
        store.close()
        raise
    if found is None:
        return state, Position()
    return found.arrays, position_from_json(found.meta["position"])


def _open_records(records: Records, start_step: int) -> list[Hook]:
    reports: list[Hook] = [Report(make_display())] if records.display else []
    if records.directory is None:
        return reports
    if start_step == 0:
        set_aside(records.directory)
    else:
        # What came after the last checkpoint is done again, and written again.
        drop_after(Path(records.directory) / "metrics.jsonl", step=start_step)
    write_run_record(records.directory, seed=records.seed, arguments=records.arguments)
    when = every(n_steps=records.write_every)
    return [*reports, WriteMetrics(directory_writer(records.directory), when)]
