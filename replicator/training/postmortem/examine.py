"""Examine a run that died: find the step, do again what led to it, write a bundle.

Of several processes all do the steps again, as one, and the first writes. That needs a
failure that all have met: a bad number, which they look for together.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax.experimental import checkify

from replicator.base.padded import unpadded
from replicator.base.to_host import whole_on_host
from replicator.base.types import PyTree
from replicator.distributed.agreement import exchange
from replicator.distributed.coordination import process_index
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.errors import (
    DistributedError,
    NonFiniteError,
    ReplicatorError,
    SpikeError,
)
from replicator.inputs.placement import Placed
from replicator.training.postmortem.capture import rebuild, write_post_mortem
from replicator.training.postmortem.recorded_program import first_replica, joined_batch

_MEET_S = 60.0  # how long who met a failure waits for the others to meet it, too
_log = logging.getLogger(__name__)

Reopened = tuple[PyTree, Any, int]
"""A state, the input after it, and the updates behind both."""


class RecordsFailure:
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


def is_met_by_all(failure: Exception) -> bool:
    """Tell whether a failure comes up in all processes at once, if in one."""
    return isinstance(failure, NonFiniteError | SpikeError | checkify.JaxRuntimeError)


def examine(
    run_directory: str | os.PathLike[str],
    failure: Exception,
    *,
    bad_step: int,
    step: Callable[[PyTree, Placed], tuple[PyTree, PyTree]],
    one_replica: KeyedStep,
    reopen: Callable[[], Reopened | None],
    about: Mapping[str, Any],
    together: bool = False,
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
      together: Whether all processes of the program do this, for the same failure.

    Returns:
      The bundle's directory; None if it could not be written.
    """
    if together and not _all_are_here(bad_step):
        return None
    state, batch, layout = _before(bad_step, step, reopen)
    path = None
    if not together or process_index() == 0:
        path = write_post_mortem(
            run_directory,
            failure,
            step=bad_step,
            update=one_replica,
            state=state,
            batch=batch,
            about={**about, **layout},
        )
    # Who left before it is written would take the one that writes along.
    return _path_of_first(path) if together else path


def _before(
    bad_step: int,
    step: Callable[[PyTree, Placed], tuple[PyTree, PyTree]],
    reopen: Callable[[], Reopened | None],
) -> tuple[PyTree, PyTree, dict[str, int]]:
    """Return state and batch before the step, on the host, and how the batch lay."""
    try:
        if (opened := reopen()) is None:
            return None, None, {}
        state, batches, start_step = opened
        try:
            found = rebuild(
                step, state, batches, start_step=start_step, bad_step=bad_step
            )
        finally:
            batches.close()
        if found is None:
            return None, None, {}
        state, placed = found
        calls = {"steps_per_call": placed.steps_per_call}
        value = whole_on_host(placed.value)
        batch = joined_batch(value, accumulate=placed.accumulate, **calls)
        return unpadded(whole_on_host(first_replica(state))), batch, calls
    except Exception as problem:
        # The run's own failure is what its user must see.
        _log.warning(
            "The state before step %d could not be rebuilt: %r", bad_step, problem
        )
        return None, None, {}


def _all_are_here(bad_step: int) -> bool:
    try:
        steps = exchange("post-mortem/step", bad_step, timeout_s=_MEET_S)
    except DistributedError as problem:
        _log.warning(
            "No post-mortem bundle: the others did not fail alike. %s", problem
        )
        return False
    return set(steps) == {bad_step}


def _path_of_first(path: Path | None) -> Path | None:
    try:
        said = exchange("post-mortem/path", None if path is None else str(path))[0]
    except DistributedError as problem:
        _log.warning("It is not known whether there is a bundle: %s", problem)
        return path
    return None if said is None else Path(said)
