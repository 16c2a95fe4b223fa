"""Checks before a run opens; watchdog, signals and journal entry of its end."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replicator.checkpoint.disk import require_room
from replicator.checkpoint.snapshot import describe_leaves
from replicator.distributed.leaving import leave_at_once
from replicator.distributed.notices import OwnNotices, open_notices
from replicator.distributed.same_everywhere import require_same_arguments
from replicator.errors import ArgumentError, Preempted
from replicator.inputs.adapters import check_read_anew
from replicator.training.preemption.preemption import Preemption
from replicator.training.preemption.stop_agreement import StopAgreement
from replicator.training.replica_check import require_copies
from replicator.training.run_spec import RunSpec
from replicator.training.watchdog import Watchdog


def require_possible(spec: RunSpec) -> None:
    """Refuse a run that could not be saved or go back, before anything is open.

    Raises:
      ArgumentError: It could not be saved, its state is larger than the disk, it could
        not go back, or it has no copies of its state to compare.
      DistributedError: It is not the same in all processes.
    """
    _require_way_back(spec)
    require_copies(spec)
    if spec.checkpointing is not None:
        describe_leaves(spec.first.shapes)
        if isinstance(spec.checkpointing.directory, Path):
            require_room(spec.checkpointing.directory, spec.first.shapes)
    _require_same(spec)


def _require_way_back(spec: RunSpec) -> None:
    policy = spec.recovery.policy
    if not policy.goes_back:
        return
    option, other = next(
        names
        for action, names in (
            (policy.on_nonfinite, ("on_nonfinite", 'on_nonfinite="skip"')),
            (policy.on_spike, ("spikes", 'Spikes(action="log")')),
            (policy.on_mismatch, ("on_mismatch", 'on_mismatch="raise"')),
        )
        if action == "rollback"
    )
    if spec.checkpointing is None:
        raise ArgumentError(
            "`checkpoint_dir` must be given to go back to a checkpoint, got None. "
            f"Pass it, or choose `{other}`."
        )
    if spec.dataset is None or spec.step is None:
        raise ArgumentError(
            "`step_fn` and `dataset` must be given to go back to a checkpoint, got "
            f"None. Pass both, or leave `{option}` out."
        )
    check_read_anew(
        "dataset",
        spec.dataset,
        why=option if option == "spikes" else f"{option}='rollback'",
        adapters=spec.reading.adapters,
    )


def _require_same(spec: RunSpec) -> None:
    """Refuse a run that is not the same in all processes."""
    plain = (bool, int, float, str, type(None))
    options = {
        name: each for name, each in spec.arguments.items() if isinstance(each, plain)
    }
    saved = spec.checkpointing and str(spec.checkpointing.when)
    compared = spec.replica_checks and str(spec.replica_checks)
    options |= {"checkpoint_every": saved, "check_replicas_every": compared}
    require_same_arguments(spec.mesh, {"seed": spec.seed} | options)


@contextmanager
def guarded(spec: RunSpec, *, stoppable: bool = True) -> Iterator[Preemption | None]:
    """Watch the calling thread's run for hangs, and handle signals for it.

    If a run is not saved, signals keep their usual effect. In a node of a program the
    node's stop event takes the place of signals, and a hang fails the node instead of
    ending the process.

    Args:
      spec: The run. If several processes make it, they call this in the same order.
      stoppable: Whether signals or the node can ask it to stop.

    Yields:
      The hook of stop requests; None if the run takes none.
    """
    notices = open_notices() if spec.together else OwnNotices()

    def leave(code: int) -> None:
        if spec.recording.uploads is not None:
            spec.recording.uploads.flush()  # with the stacks
        os._exit(code)

    node = spec.node if stoppable else None
    with Watchdog(
        spec.phases,
        limits=spec.limits,
        directory=spec.recording.directory,
        notices=notices,
        log=spec.log,
        exit_process=leave,
        fail=None if node is None else node.fail,
    ):
        if not stoppable or (spec.checkpointing is None and node is None):
            yield None
            return
        with Preemption(StopAgreement(notices), node=node) as preemption:
            yield preemption


@contextmanager
def log_end(spec: RunSpec) -> Iterator[None]:
    """Write the end of a run, and its cause, into the journal."""
    try:
        yield
    except Preempted:
        raise  # the journal has it already
    except SystemExit as leaving:
        step = spec.phases.current.step
        spec.log("ended", step=step, error=f"sys.exit({leaving.code!r})")
        is_main = threading.current_thread() is threading.main_thread()
        if leaving.code not in (None, 0) and is_main:
            # The others wait in a step: their supervisor must see that one left.
            leave_at_once(leaving.code if isinstance(leaving.code, int) else 1)
        raise
    except BaseException as failure:
        spec.log("ended", step=spec.phases.current.step, error=_one_line(failure))
        raise
    spec.log("ended", step=spec.phases.current.step)


def _one_line(failure: BaseException) -> str:
    text = str(failure).split("\n", 1)[0]
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__
