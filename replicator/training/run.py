"""Run a compiled step, from the last checkpoint if there is one, and keep records.

What cannot work is refused first; then `open_run` opens, runs and closes; whatever ends
the run, its journal says so, and the user's hooks are closed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from replicator.checkpoint.snapshot import describe_leaves
from replicator.distributed.leaving import leave_at_once
from replicator.distributed.same_everywhere import require_same_arguments
from replicator.errors import ArgumentError, Preempted
from replicator.inputs.skipped_batches import require_rereadable
from replicator.monitoring.events import EventLog
from replicator.monitoring.phases import Phases
from replicator.training.closing import closed_at_the_end
from replicator.training.loop import LoopResult
from replicator.training.nonfinite.rollback import retry_after_rollback
from replicator.training.open_run import Attempts, Training, teller
from replicator.training.reports.records import alone_in


def train(training: Training) -> LoopResult:
    """Run until the plan's steps are done, from wherever the run was saved.

    Args:
      training: What the run is made of.

    Returns:
      The loop's result, with the user's state.

    Raises:
      ArgumentError: The run is to go back, and is not saved, or its dataset cannot be
        read again.
      CheckpointInUseError: Another run writes to the directory.
      Preempted: A signal asked the run to stop, and it is saved.
      Exception: Whatever the step, the dataset or a hook raised.
    """
    _require_way_back(training)
    if training.checkpoints is not None:
        describe_leaves(training.first.shapes)  # refuses what could not be saved
    _require_same(training)
    events, directory = training.events, training.records.directory
    attempts = Attempts(training)
    # A hook that stands in two places is one hook: methods of one object are equal.
    closers = list(dict.fromkeys(hook.close for hook in training.hooks))
    with (
        closed_at_the_end(closers),
        alone_in(directory, training.mesh),
        _told(events, training.phases),
        attempts.examined(),
    ):
        return retry_after_rollback(attempts.run, attempts.discard_after)


def _require_way_back(training: Training) -> None:
    """Refuse a run that is to go back and cannot."""
    if not training.recovery.policy.goes_back:
        return
    if training.checkpoints is None:
        raise ArgumentError(
            "`checkpoint_dir` must be given to go back to a checkpoint, got None. "
            'Pass it, or choose `on_nonfinite="skip"`.'
        )
    require_rereadable(training.dataset, why="on_nonfinite='rollback'")


def _require_same(training: Training) -> None:
    """Refuse a run that is not the same in all processes."""
    plain = (bool, int, float, str, type(None))
    arguments = training.records.arguments.items()
    said = {name: word for name, word in arguments if isinstance(word, plain)}
    saved = training.checkpoints and str(training.checkpoints.when)
    require_same_arguments(
        training.mesh,
        {"seed": training.records.seed, "checkpoint_every": saved} | said,
    )


@contextmanager
def _told(events: EventLog | None, phases: Phases) -> Iterator[None]:
    """Tell of the run's end, and of what ended it."""
    tell = teller(events)
    try:
        yield
    except Preempted:
        raise  # the journal says so already
    except SystemExit as leaving:
        tell("ended", step=phases.current.step, error=f"sys.exit({leaving.code!r})")
        if leaving.code not in (None, 0):
            # The others wait in a step: whoever watches them must see that one left.
            leave_at_once(leaving.code if isinstance(leaving.code, int) else 1)
        raise
    except BaseException as failure:
        tell("ended", step=phases.current.step, error=_one_line(failure))
        raise
    tell("ended", step=phases.current.step)


def _one_line(failure: BaseException) -> str:
    words = str(failure).split("\n", 1)[0]
    return f"{type(failure).__name__}: {words}" if words else type(failure).__name__
