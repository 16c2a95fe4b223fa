"""Apply the policy for bad numbers: log, stop, or take the run back past them.

Going back ends the run and resumes it in the same process: checkpoints from the bad
step on are deleted, as a crash would resume from them, and everything is opened again
from the one before. The steps in between are made again with the same keys and batches,
so the result does not depend on where the last checkpoint was; only the bad call's
batches are left out. The checkpoints after it hold which. A crash before the first of
those meets the bad number again, and goes back again.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from replicator.base.types import PyTree
from replicator.engine.step.optimizer_state import optimizer_states
from replicator.errors import NonFiniteError, ReplicaMismatchError, SpikeError
from replicator.hooks.protocol import Hook, MetricsEvent
from replicator.inputs.placement import Placed
from replicator.inputs.prefetch import Prefetcher
from replicator.inputs.skipped_batches import SkippedBatches
from replicator.monitoring.events import EventLog
from replicator.training.nonfinite.policy import (
    BadNumber,
    History,
    OnMismatch,
    OnNonfinite,
    Reaction,
    RecoveryPolicy,
    decide,
    history_from_json,
    resume_at,
)
from replicator.training.nonfinite.spikes import Spikes

_log = logging.getLogger(__name__)
_ERRORS = {
    "nonfinite": NonFiniteError,
    "spike": SpikeError,
    "mismatch": ReplicaMismatchError,
}


class GoingBack(Exception):
    """Ends a run that resumes from an earlier checkpoint; not an error.

    Attributes:
      before_step: The bad step: checkpoints from it on are not used.
    """

    def __init__(self, before_step: int, *, kind: str = "nonfinite") -> None:
        super().__init__(f"The run goes back to before step {before_step}.")
        self.before_step = before_step
        self._kind = kind

    def too_late(self, *, is_saved: bool) -> NonFiniteError | ReplicaMismatchError:
        """Return the error to raise if the loop has ended and cannot go back.

        Args:
          is_saved: Whether there is a checkpoint from before the bad step.
        """
        remedy = "Start it again: it goes on from the checkpoint before that."
        if self._kind == "mismatch":
            return ReplicaMismatchError(
                "`state` must be equal on all devices until the loop ends, got other "
                f"bits at step {self.before_step}. Start it again: it goes on from the "
                "last checkpoint, if there is one.",
                step=self.before_step,
                leaf="",
            )
        if not is_saved:
            remedy = "Look at its batch: there is no checkpoint from before it."
        return NonFiniteError(
            "`metrics` must be finite until the loop ends, got a bad number at step "
            f"{self.before_step}. {remedy}",
            step=self.before_step,
            leaf="",
        )


class Recovery(Hook):
    """Recovery from bad numbers, kept over all rollbacks of a run.

    As a hook it watches a metric for spikes, and keeps its history in checkpoints.

    Args:
      policy: Actions that the user chose.
      spikes: Metric to watch for spikes; None for none.
      journal: Journal of the run; None for the log alone.

    Attributes:
      went_back: Whether this run was resumed by a rollback, perhaps at its beginning.
    """

    def __init__(
        self,
        policy: RecoveryPolicy,
        *,
        spikes: Spikes | None = None,
        journal: EventLog | None = None,
    ) -> None:
        self.policy = policy
        self.history = History()
        self.went_back = False
        self._gone_back_for: BadNumber | None = None
        self._spikes = spikes
        self._seen: tuple[float, ...] = ()
        self._journal = journal
        self._batches: SkippedBatches | None = None

    @property
    def ignores(self) -> bool:
        """True if NaN and infinity among metrics are ignored."""
        return self.policy.on_nonfinite == "ignore"

    def on_metrics(self, event: MetricsEvent) -> None:
        """Look for a spike.

        Raises:
          ArgumentError: The step reports no such metric.
          SpikeError: As `handle`.
          GoingBack: As `handle`.
        """
        if self._spikes is None:
            return
        value = self._spikes.value_in(event.metrics)
        self._seen, spike = self._spikes.decide(self._seen, value)
        if spike is not None:
            leaf = self._spikes.metric
            self.handle(
                BadNumber(kind="spike", step=event.step, leaf=leaf, found=spike)
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the history, and the window of the watched metric."""
        return {"history": dataclasses.asdict(self.history), "seen": list(self._seen)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the history of a checkpoint, unless this run's is longer."""
        found = history_from_json(state["history"])
        if len(found.left_out) >= len(self.history.left_out):
            self.history = found
        self._seen = tuple(state["seen"])

    def watch(self, batches: Prefetcher[Placed]) -> SkippedBatches:
        """Return `batches` without those that are left out; see `SkippedBatches`."""
        self._batches = SkippedBatches(batches, left_out=self.history.left_out)
        return self._batches

    @property
    def can_repeat(self) -> bool:
        """True if reading the input again makes the same steps again."""
        return self._batches is None or self._batches.in_order

    def handle(self, event: BadNumber) -> None:
        """Act on a bad number; returns if the run goes on.

        Args:
          event: The bad number.

        Raises:
          NonFiniteError: The run ends because of a number that is not finite.
          SpikeError: The run ends because of a spike.
          ReplicaMismatchError: The run ends because of copies that differ.
          GoingBack: The run resumes from an earlier checkpoint.
        """
        by_batch = event.kind != "mismatch"
        if by_batch and event.call is None and self._batches is not None:
            event = dataclasses.replace(event, call=self._batches.call_of(event.step))
        self.history, action = decide(self.policy, self.history, event)
        self._act(event, action)

    def resume_at(self, start_step: int) -> None:
        """Count a rollback, if there was one: the run resumes at `start_step`.

        Raises:
          NonFiniteError: Too many rollbacks without a new checkpoint in between.
          SpikeError: Likewise.
        """
        event, self._gone_back_for = self._gone_back_for, None
        if event is not None:
            self.history, action = resume_at(
                self.policy, self.history, event, start_step=start_step
            )
            self._act(event, action)

    def _act(self, event: BadNumber, action: Reaction) -> None:
        if action.note is not None:
            self._note(action.note, event)
        if action.goes_back:
            self._note("rolled_back", event)
            self._seen, self.went_back = (), True
            self._gone_back_for = event
            raise GoingBack(event.step, kind=event.kind)
        if action.stop is not None:
            raise _ERRORS[event.kind](action.stop, step=event.step, leaf=event.leaf)

    def _note(self, kind: str, event: BadNumber) -> None:
        step, leaf, found = event.step, event.leaf, event.found
        _log.warning("Step %d, %s: `%s` was %s.", step, kind, leaf, found)
        if self._journal is not None:
            self._journal.write(
                kind, step=step, leaf=leaf, found=found, batch=event.call
            )


def make_recovery(
    state: PyTree,
    *,
    on_nonfinite: OnNonfinite | None = None,
    spikes: Spikes | None = None,
    on_mismatch: OnMismatch = "raise",
    journal: EventLog | None = None,
) -> Recovery:
    """Return the recovery from bad numbers that the user chose.

    >>> make_recovery({"w": 0.0}).policy.on_nonfinite
    'raise'

    Args:
      state: State of the run, or its shapes: by default a bad number raises, unless an
        optimizer in it skips such updates itself.
      on_nonfinite: Action on NaN and infinity.
      spikes: Metric to watch for spikes; None for none.
      on_mismatch: Action on copies that differ.
      journal: Journal of the run; None for the log alone.

    Raises:
      ArgumentError: A choice is unknown.
    """
    skips = any(each.skipped is not None for each in optimizer_states(state))
    policy = RecoveryPolicy(
        on_nonfinite=on_nonfinite or ("ignore" if skips else "raise"),
        on_spike=spikes.action if spikes is not None else "log",
        on_mismatch=on_mismatch,
    )
    return Recovery(policy, spikes=spikes, journal=journal)
