"""Examine a run that died: find the step, do again what led to it, write a bundle."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replicator.collecting import KeyedStep
from replicator.errors import NonFiniteError, ReplicatorError, SpikeError
from replicator.inputs.placement import Placed
from replicator.postmortem.capture import rebuild, write_post_mortem
from replicator.postmortem.recorded_program import joined_batch
from replicator.protocols import PyTree

_log = logging.getLogger(__name__)

Reopened = tuple[PyTree, Any, int]
"""A state, the input after it, and the updates behind both."""


class Blamed:
    """A step that remembers what it raised.

    Args:
      step: The run's own.
    """

    def __init__(self, step: Callable[[PyTree, Any], tuple[PyTree, PyTree]]) -> None:
        self._step = step
        self.failure: Exception | None = None

    def __call__(self, state: PyTree, batch: Any) -> tuple[PyTree, PyTree]:
        """Make a step; what it raises is remembered."""
        try:
            return self._step(state, batch)
        except Exception as failure:
            self.failure = failure
            raise

    def bad_step(self, failure: Exception, *, dispatched: int) -> int | None:
        """Return the step to examine for a failure; None if it was no step's fault.

        Args:
          failure: What ended the run.
          dispatched: Updates dispatched before.
        """
        if isinstance(failure, NonFiniteError | SpikeError):
            return failure.step
        # What we refuse ourselves (a batch, a program) says all there is to say.
        if failure is self.failure and not isinstance(failure, ReplicatorError):
            return dispatched + 1
        return None


def examine(
    run_directory: str | os.PathLike[str],
    failure: Exception,
    *,
    bad_step: int,
    step: Callable[[PyTree, Placed], tuple[PyTree, PyTree]],
    one_replica: KeyedStep,
    reopen: Callable[[], Reopened | None],
    about: Mapping[str, Any],
) -> Path | None:
    """Write a bundle for a step that failed, with the state before it if possible.

    Args:
      run_directory: The bundle goes to `postmortem/<step>` in it.
      failure: What ended the run.
      bad_step: The step that failed.
      step: The run's own, compiled.
      one_replica: The same for one replica; see `one_replica_update`.
      reopen: Returns where the run could go on before that step; None if it could not.
      about: Plain values to write beside.

    Returns:
      The bundle's directory; None if it could not be written.
    """
    state, placed = _before(bad_step, step, reopen)
    batch = None
    if placed is not None:
        batch = joined_batch(
            placed.value,
            accumulate=placed.accumulate,
            steps_per_call=placed.steps_per_call,
        )
        about = {**about, "steps_per_call": placed.steps_per_call}
    return write_post_mortem(
        run_directory,
        failure,
        step=bad_step,
        update=one_replica,
        state=state,
        batch=batch,
        about=about,
    )


def _before(
    bad_step: int,
    step: Callable[[PyTree, Placed], tuple[PyTree, PyTree]],
    reopen: Callable[[], Reopened | None],
) -> tuple[PyTree, Placed | None]:
    try:
        if (opened := reopen()) is None:
            return None, None
        state, batches, start_step = opened
        try:
            found = rebuild(
                step, state, batches, start_step=start_step, bad_step=bad_step
            )
        finally:
            batches.close()
        return found or (None, None)
    except Exception as problem:
        # The run's own failure is what its user must see.
        _log.warning(
            "The state before step %d could not be rebuilt: %r", bad_step, problem
        )
        return None, None
