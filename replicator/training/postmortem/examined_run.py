"""Write down what a step that ends a run was given, for `replicator replay`."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager

from replicator.engine.compiled_step import CompiledStep
from replicator.engine.memory_errors import is_out_of_memory
from replicator.inputs.adapters import check_read_anew
from replicator.inputs.feed import open_input
from replicator.training.checkpoint_hook import open_store
from replicator.training.guards import guarded
from replicator.training.open_run import Training, find_start
from replicator.training.postmortem.examine import (
    RecordsFailure,
    Reopened,
    examine,
    is_met_by_all,
)


@contextmanager
def examined(of: Training, step: RecordsFailure) -> Iterator[None]:
    """Examine what fails in the block, if it was a step.

    Args:
      of: The run; closed when the block ends.
      step: The run's own.

    Raises:
      DeviceMemoryError: In place of XLA's, that memory was short.
    """
    try:
        yield
    except Exception as failure:
        # What a step lacked may come to light where its metrics are read.
        if is_out_of_memory(failure) and isinstance(of.step, CompiledStep):
            raise of.step.explained(failure) from failure
        bad_step = step.bad_step(failure, dispatched=of.phases.current.step)
        meets = not of.together or is_met_by_all(failure)
        directory = of.recording.directory
        if meets and directory is not None and bad_step is not None:
            _examine(of, directory, failure, bad_step)
        raise


def _examine(
    of: Training,
    directory: str | os.PathLike[str],
    failure: Exception,
    bad_step: int,
) -> None:
    assert of.step is not None
    assert of.one_replica is not None
    watched = guarded(
        of.phases,
        limits=of.limits,
        directory=directory,
        together=of.together,
        tell=of.tell,
    )
    with watched, of.phases.during("end"):
        found = examine(
            directory,
            failure,
            bad_step=bad_step,
            step=of.step,
            one_replica=of.one_replica,
            reopen=lambda: _reopen(of),
            about={"arguments": of.arguments, "seed": of.seed},
            together=of.together,
        )
    if found is not None:
        failure.add_note(f"To look at the step: replicator replay {found}")


def _reopen(of: Training) -> Reopened | None:
    """Return where the run could go on, to come to a step once more."""
    if of.dataset is None or not of.recovery.can_repeat:
        return None
    check_read_anew(
        "dataset", of.dataset, why="a post-mortem bundle", adapters=of.reading.adapters
    )
    resumed = None
    if of.checkpointing is not None:
        with open_store(of.checkpointing, of.hooks, of.layout) as store:
            resumed = find_start(of, store)
    resumed = resumed or find_start(of, None)
    reading = dataclasses.replace(of.reading, steps=None)
    batches = open_input(of.dataset, of.layout, options=reading, start=resumed.position)
    return resumed.state, of.recovery.watch(batches), resumed.start_step
