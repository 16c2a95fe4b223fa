"""Examine a run that died: find the step, repeat the steps before it, write a bundle.

A step's state is donated to the next step, and a bad number is noticed late. So the
state before the bad step is computed again, from the last checkpoint, with the same
keys and batches: to the same bits. While a run is well this costs nothing.

If there are several processes, all make the steps again, as one, and the first writes.
That needs a failure that all have: a bad number, which they look for together.
"""

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental import checkify

from replicator.base.out_of_memory import is_out_of_memory
from replicator.base.padded import unpadded
from replicator.base.per_replica import take_own
from replicator.base.tracebacks import full_traceback
from replicator.base.types import PyTree
from replicator.distributed.agreement import exchange
from replicator.distributed.coordination import process_index
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.errors import (
    DistributedError,
    NonFiniteError,
    ReplicatorError,
    SpikeError,
)
from replicator.inputs.adapters import check_read_anew
from replicator.inputs.feed import open_input
from replicator.inputs.placement import Placed
from replicator.inputs.skipped_batches import SkippedBatches
from replicator.training.checkpoint_hook import find_start, open_store
from replicator.training.guards import guarded
from replicator.training.loop import Step
from replicator.training.postmortem.bundle import Bundle, arrays_of, write_bundle
from replicator.training.postmortem.recorded_program import (
    RecordedProgram,
    export_program,
    joined_batch,
    one_replica_update,
    record_program,
)
from replicator.training.run_spec import RunSpec
from replicator.training.to_host import whole_on_host

_MEET_S = 60.0  # wait of a process with a failure for the others to have it, too
_log = logging.getLogger(__name__)

Reopened = tuple[PyTree, SkippedBatches, int]
"""A state, the input after it, and the updates behind both."""


class RecordsFailure:
    """A step that remembers its exception.

    Args:
      step: Step of the run.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.failure: Exception | None = None

    def __call__(self, state: PyTree, batch: Any) -> tuple[PyTree, PyTree]:
        """Make a step, and remember its exception."""
        try:
            return self._step(state, batch)
        except Exception as failure:
            self.failure = failure
            raise

    def bad_step(self, failure: Exception, *, dispatched: int) -> int | None:
        """Return the step to examine for a failure; None if it is not from a step.

        Args:
          failure: The exception that ended the run.
          dispatched: Number of updates dispatched before.
        """
        if isinstance(failure, NonFiniteError | SpikeError):
            return failure.step
        # Our own refusals (of a batch, a program) need no bundle.
        if failure is self.failure and not isinstance(failure, ReplicatorError):
            return dispatched + 1
        return None


def is_met_by_all(failure: Exception) -> bool:
    """Return whether a failure is raised in all processes at once, if in one."""
    return isinstance(failure, NonFiniteError | SpikeError | checkify.JaxRuntimeError)


@contextmanager
def examined(spec: RunSpec, step: RecordsFailure) -> Iterator[None]:
    """Examine a step that fails in the block, for `replicator replay`.

    Args:
      spec: The run; closed when the block ends.
      step: Step of the run.

    Raises:
      DeviceMemoryError: In place of XLA's out-of-memory error.
    """
    try:
        yield
    except Exception as failure:
        # An out-of-memory error of a step may be raised where its metrics are read.
        if is_out_of_memory(failure) and isinstance(spec.step, CompiledStep):
            raise spec.step.explained(failure) from failure
        bad_step = step.bad_step(failure, dispatched=spec.phases.current.step)
        meets = not spec.together or is_met_by_all(failure)
        directory = spec.recording.directory
        if meets and directory is not None and bad_step is not None:
            with guarded(spec, stoppable=False), spec.phases.during("end"):
                found = examine(spec, directory, failure, bad_step)
            if found is not None:
                failure.add_note(f"To look at the step: replicator replay {found}")
        raise


def examine(
    spec: RunSpec,
    directory: str | os.PathLike[str],
    failure: Exception,
    bad_step: int,
) -> Path | None:
    """Write a bundle for a step that failed, with the state before it if possible.

    Args:
      spec: The run; closed. All its processes call this.
      directory: The bundle goes to `postmortem/<step>` in it.
      failure: The exception that ended the run.
      bad_step: Number of the step that failed.

    Returns:
      The bundle's directory; None if it could not be written.
    """
    if spec.together and not _all_are_here(bad_step):
        return None
    state, batch, layout = _before(spec, bad_step)
    path = None
    if not spec.together or process_index() == 0:
        assert spec.step_fn is not None
        path = write_post_mortem(
            directory,
            failure,
            step=bad_step,
            update=one_replica_update(
                spec.step_fn, steps_per_call=spec.plan.steps_per_call
            ),
            state=state,
            batch=batch,
            about={"arguments": spec.arguments, "seed": spec.seed, **layout},
        )
    # A process that ended before it is written would end the one that writes.
    return _path_of_first(path) if spec.together else path


def _before(spec: RunSpec, bad_step: int) -> tuple[PyTree, PyTree, dict[str, int]]:
    """Return state and batch before the step, on the host, and the batch's axes."""
    assert spec.step is not None
    try:
        if (opened := _reopen(spec)) is None:
            return None, None, {}
        state, batches, start_step = opened
        try:
            found = rebuild(
                spec.step, state, batches, start_step=start_step, bad_step=bad_step
            )
        finally:
            batches.close()
        if found is None:
            return None, None, {}
        state, placed = found
        calls = {"steps_per_call": placed.steps_per_call}
        value = whole_on_host(placed.value)
        batch = joined_batch(value, accumulate=placed.accumulate, **calls)
        return unpadded(whole_on_host(take_own(state))), batch, calls
    except Exception as problem:
        # The run's own failure is what its user must see.
        _log.warning(
            "The state before step %d could not be rebuilt: %r", bad_step, problem
        )
        return None, None, {}


def _reopen(spec: RunSpec) -> Reopened | None:
    """Reopen the run before a step, if it could go on from there."""
    if spec.dataset is None or not spec.recovery.can_repeat:
        return None
    check_read_anew(
        "dataset",
        spec.dataset,
        why="a post-mortem bundle",
        adapters=spec.reading.adapters,
    )
    resumed = None
    if spec.checkpointing is not None:
        with open_store(spec) as store:
            resumed = find_start(spec, store)
    resumed = resumed or find_start(spec, None)
    reading = dataclasses.replace(spec.reading, steps=None)
    batches = open_input(
        spec.dataset, spec.layout, options=reading, start=resumed.position
    )
    return resumed.state, spec.recovery.watch(batches), resumed.start_step


def rebuild(
    step: Step,
    state: PyTree,
    batches: Any,
    *,
    start_step: int,
    bad_step: int,
    most_calls: int = 1000,
) -> tuple[PyTree, Placed] | None:
    """Make a run's steps again, up to the call that made the bad one.

    Args:
      step: Step of the run, compiled; `state` is donated to it.
      state: State of a checkpoint before the bad step.
      batches: The run's input, opened at that checkpoint.
      start_step: Number of updates before `state`.
      bad_step: Number of the step that went bad.
      most_calls: Largest number of calls.

    Returns:
      The state before the call, and the batch of the call; None if it takes more calls,
      or the input has ended.
    """
    done = start_step
    for _ in range(most_calls):
        batch = next(batches, None)
        if batch is None:
            return None
        if done + batch.steps >= bad_step:
            return state, batch
        state, _ = step(state, batch)
        done += batch.steps
    return None


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
        first = exchange("post-mortem/path", None if path is None else str(path))[0]
    except DistributedError as problem:
        _log.warning("It is not known whether there is a bundle: %s", problem)
        return path
    return None if first is None else Path(first)


def write_post_mortem(
    run_directory: str | os.PathLike[str],
    failure: BaseException,
    *,
    step: int,
    update: KeyedStep,
    state: PyTree | None,
    batch: PyTree | None,
    about: Mapping[str, Any],
) -> Path | None:
    """Write a bundle for a step that failed; never raise.

    Args:
      run_directory: The bundle goes to `postmortem/<step>` in it.
      failure: The exception that ended the run.
      step: Number of the step that failed.
      update: Update of one replica; see `one_replica_update`.
      state: State of the first replica before the call; None if it is lost.
      batch: Whole batch of the call; None if it is lost.
      about: Other plain values: configuration, versions, checkpoint.

    Returns:
      The bundle's directory; None if it could not be written. The reason is logged.
    """
    try:
        program, exported = None, None
        if state is not None and batch is not None:
            program = _recorded(update, state, batch)
        if program is not None:
            exported = export_program(program, *jax.tree.leaves((state, batch)))
            places = [dataclasses.asdict(place) for place in program.places]
            about = {**about, "places": places, "outputs": list(program.outputs)}
        bundle = Bundle(
            step=step,
            error={
                "type": type(failure).__name__,
                "message": str(failure),
                "traceback": full_traceback(failure),
            },
            state=None if state is None else arrays_of(state),
            batch=None if batch is None else arrays_of(batch),
            jaxpr=None if program is None else program.jaxpr,
            exported=exported,
            about=about,
        )
        return write_bundle(run_directory, bundle)
    except Exception as problem:
        # The run's own failure is what its user must see.
        _log.warning("No post-mortem bundle was written: %r", problem)
        return None


def _recorded(
    update: KeyedStep, state: PyTree, batch: PyTree
) -> RecordedProgram | None:
    try:
        return record_program(update, state, batch)
    except Exception as problem:
        # A step may be made for the batch of one of several replicas.
        _log.warning("The step could not be recorded as one replica: %r", problem)
        return None
