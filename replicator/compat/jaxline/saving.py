"""Save an experiment while it is trained, and go on from it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from replicator.base.types import Key
from replicator.checkpoint.reading import Restored
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore
from replicator.compat.jaxline.device_rows import bcast_local_devices, get_first
from replicator.compat.jaxline.experiment import AbstractExperiment
from replicator.compat.jaxline.state import give_state, take_state
from replicator.errors import CheckpointMismatchError
from replicator.hooks import Every, Hook, StateEvent
from replicator.monitoring.pending_metrics import PendingMetrics, in_flight_from_json
from replicator.monitoring.phases import Phase
from replicator.monitoring.writers.writer import Writer

_STRUCTURES = "jaxline"


@dataclasses.dataclass(kw_only=True)
class Progress:
    """How far a run is; it changes with every step.

    Attributes:
      experiment: Its attributes are the state.
      rng: What the keys of the steps to come are made from, a row for each device.
      step: Updates done.
      shown_steps: Of these, those whose numbers were written before the run went on.
      in_flight: The numbers of the others, if the run goes on from a checkpoint.
      reports: Where numbers go; a checkpoint waits for them.
      writer: Where the experiment's own go.
    """

    experiment: AbstractExperiment
    rng: Key
    step: int
    shown_steps: int = 0
    in_flight: PendingMetrics | None = None
    reports: Sequence[Hook] = ()
    writer: Writer | None = None


class Saves(Hook):
    """Save the experiment at due steps and at the end.

    Args:
      store: Open; closed with the run.
      when: At which steps; None for the last only.
      progress: What is saved, and where what was saved goes.
    """

    phase: Phase = "save"

    def __init__(
        self, store: CheckpointStore, when: Every | None, progress: Progress
    ) -> None:
        self._store = store
        self._trigger = None if when is None else when.trigger()
        self._progress = progress
        self._saved_step: int | None = None

    def restore(self) -> bool:
        """Go on from what was saved last, if anything was; tell whether it was."""
        found = self._store.restore()
        if found is None:
            return False
        progress = self._progress
        give_saved(found, progress.experiment)
        progress.rng = bcast_local_devices(found.arrays["train_step_rng"])
        progress.step = self._saved_step = found.step
        progress.shown_steps = found.step
        late = found.meta.get("in_flight")
        if late is not None:
            progress.in_flight = in_flight_from_json(late, position=None)
            progress.shown_steps -= progress.in_flight.steps
        return True

    def save_first(self) -> None:
        """Save before the first step, durably."""
        self._store.save(self._snapshot(None))

    def on_state(self, event: StateEvent) -> None:
        """Begin to save if due; what is saved is copied before the next step."""
        due = self._trigger is not None and self._trigger.pulled(event)
        if due and self._store.save_nowait(self._snapshot(event.in_flight)):
            self._saved_step = event.step

    def on_end(self, event: StateEvent) -> None:
        """Save the last step, durably."""
        self._store.wait()
        if self._saved_step != event.step:
            self._store.save(self._snapshot(event.in_flight))

    def close(self) -> None:
        """Wait for a save in flight, and give the directory back."""
        self._store.close()

    def _snapshot(self, in_flight: PendingMetrics | None) -> Snapshot:
        structures, arrays = take_state(self._progress.experiment)
        return Snapshot(
            step=self._progress.step,
            arrays={
                "experiment": arrays,
                "train_step_rng": get_first(self._progress.rng),
            },
            meta={_STRUCTURES: structures},
            late=self._late(in_flight),
        )

    def _late(self, in_flight: PendingMetrics | None) -> Callable[[], dict[str, Any]]:
        reports = self._progress.reports

        def wait() -> dict[str, Any]:
            # What was told before this step is told again by nobody: it must be there.
            for report in reports:
                report.flush()
            return {"in_flight": in_flight and in_flight.as_json()}

        return wait


def give_saved(found: Restored, experiment: AbstractExperiment) -> None:
    """Set an experiment's attributes to those of a checkpoint.

    Raises:
      CheckpointMismatchError: It is none of an experiment.
    """
    structures = found.meta.get(_STRUCTURES)
    if structures is None:
        raise CheckpointMismatchError(
            "`directory` must hold checkpoints of an experiment, got one of another "
            "run. Choose another directory."
        )
    give_state(experiment, structures, found.arrays.get("experiment", {}))
