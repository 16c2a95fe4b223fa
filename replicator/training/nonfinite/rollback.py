"""Drive the policy: note, stop, or take the run back past what led it astray.

To go back is to end the run and resume it, in one process: the checkpoints from the bad
step on are deleted, for a crash would resume them, and everything is opened again from
the one before. The steps in between are done again with the same keys and batches, so
the run comes out the same wherever its last checkpoint was; only the bad call's batches
are left out. That is remembered in the checkpoints after it. A crash before the first
of those forgets it, meets the bad number again, and goes back again.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from replicator.base.types import PyTree
from replicator.engine.step.optimizer_state import optimizer_states
from replicator.errors import NonFiniteError, SpikeError
from replicator.hooks.protocol import Hook, MetricsEvent
from replicator.inputs.placement import Placed
from replicator.inputs.prefetch import Prefetcher
from replicator.inputs.skipped_batches import SkippedBatches
from replicator.monitoring.events import EventLog
from replicator.training.nonfinite.policy import (
    BadNumber,
    History,
    OnNonfinite,
    Outcome,
    Policy,
    come_back,
    decide,
    history_from_json,
)
from replicator.training.nonfinite.spikes import Spikes

_log = logging.getLogger(__name__)


class GoingBack(Exception):
    """Ends a run that is to go on from an earlier checkpoint; no error.

    Attributes:
      before_step: The bad step: its checkpoints, and those after it, are worthless.
    """

    def __init__(self, before_step: int) -> None:
        super().__init__(f"The run goes back to before step {before_step}.")
        self.before_step = before_step

    def too_late(self, *, is_saved: bool) -> NonFiniteError:
        """Return what is raised where no loop is left that could go back.

        Args:
          is_saved: Whether a checkpoint from before it is there.
        """
        remedy = "Start it again: it goes on from the checkpoint before that."
        if not is_saved:
            remedy = "Look at its batch: no checkpoint from before it is there."
        return NonFiniteError(
            "`metrics` must be finite until the loop ends, got a bad number at step "
            f"{self.before_step}. {remedy}",
            step=self.before_step,
            leaf="",
        )


class Recovery(Hook):
    """What a run does about bad numbers, over all the times that it goes back.

    As a hook it watches a metric for spikes, and keeps its history in checkpoints.

    Args:
      policy: What the user wants.
      spikes: What to watch for; None for no spikes.
      journal: Where it is noted; None for the log alone.

    Attributes:
      went_back: Whether this run goes on after it went back, maybe to its beginning.
    """

    def __init__(
        self,
        policy: Policy,
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
        """Whether nobody need look at metrics for NaN and infinity."""
        return self.policy.on_nonfinite == "ignore"

    def on_metrics(self, event: MetricsEvent) -> None:
        """Look for a spike.

        Raises:
          ArgumentError: The step reports no such metric.
          SpikeError: As `tell`.
          GoingBack: As `tell`.
        """
        if self._spikes is None:
            return
        value = self._spikes.value_in(event.metrics)
        self._seen, spike = self._spikes.decide(self._seen, value)
        if spike is not None:
            leaf = self._spikes.metric
            self.tell(BadNumber(kind="spike", step=event.step, leaf=leaf, found=spike))

    def state_dict(self) -> dict[str, Any]:
        """Return the history, and the numbers that say what is usual."""
        return {"history": dataclasses.asdict(self.history), "seen": list(self._seen)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up the history of a checkpoint, unless this run knows more."""
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
        """Whether to read the input again is to make the same steps again."""
        return self._batches is None or self._batches.in_order

    def tell(self, event: BadNumber) -> None:
        """Act on a bad number; returns if the run goes on.

        Args:
          event: What was found.

        Raises:
          NonFiniteError: The run ends, for a number that is not finite.
          SpikeError: The run ends, for a spike.
          GoingBack: The run is to be opened again, from an earlier checkpoint.
        """
        if event.call is None and self._batches is not None:
            event = dataclasses.replace(event, call=self._batches.call_of(event.step))
        self.history, outcome = decide(self.policy, self.history, event)
        self._act(event, outcome)

    def come_back(self, start_step: int) -> None:
        """Count a rollback, if there was one: the run goes on from `start_step`.

        Raises:
          NonFiniteError: As `tell`: too many, and no new checkpoint in between.
          SpikeError: Likewise.
        """
        event, self._gone_back_for = self._gone_back_for, None
        if event is not None:
            self.history, outcome = come_back(
                self.policy, self.history, event, start_step=start_step
            )
            self._act(event, outcome)

    def _act(self, event: BadNumber, outcome: Outcome) -> None:
        if outcome.note is not None:
            self._note(outcome.note, event)
        if outcome.goes_back:
            self._note("rolled_back", event)
            self._seen, self.went_back = (), True
            self._gone_back_for = event
            raise GoingBack(event.step)
        if outcome.stop is not None:
            kind = SpikeError if event.kind == "spike" else NonFiniteError
            raise kind(outcome.stop, step=event.step, leaf=event.leaf)

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
    journal: EventLog | None = None,
) -> Recovery:
    """Return what a run does about bad numbers, from what its user said.

    Args:
      state: The run's, or its shapes: by default a bad number is raised, unless an
        optimizer in there skips such updates itself.
      on_nonfinite: What NaN and infinity lead to.
      spikes: What to watch for.
      journal: Where it is noted; None for the log alone.

    Raises:
      ArgumentError: A word is unknown.
    """
    skips = any(each.skipped is not None for each in optimizer_states(state))
    policy = Policy(
        on_nonfinite=on_nonfinite or ("ignore" if skips else "raise"),
        on_spike=spikes.action if spikes is not None else "log",
    )
    return Recovery(policy, spikes=spikes, journal=journal)
