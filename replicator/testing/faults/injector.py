"""Make a schedule of faults happen: a hook, a wrapper of datasets, and a disk."""

import collections
import errno
import functools
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from replicator.base.host.paths import checked_path
from replicator.base.types import Dataset, PyTree
from replicator.checkpoint.disk import Disk
from replicator.checkpoint.lock import OWNER_NAME
from replicator.distributed.coordination import process_index
from replicator.errors import ReplicatorError
from replicator.hooks.protocol import Hook, StateEvent
from replicator.testing.faults import effects
from replicator.testing.faults.dataset import faulty
from replicator.testing.faults.journal import Journal
from replicator.testing.faults.schedule import Fault, parse

FAULTS_VARIABLE = "REPLICATOR_FAULTS"
JOURNAL_VARIABLE = "REPLICATOR_FAULTS_JOURNAL"
SEED_VARIABLE = "REPLICATOR_FAULTS_SEED"
_ELSEWHERE = ("disk full", "flip a bit in the state")  # not as a hook


class InjectedError(ReplicatorError, RuntimeError):
    """Error of the fault `raise at step n`."""


class Injector(Hook):
    """Makes faults happen in a run that has it as a hook.

    As a hook it breaks the process, and damages the state; the dataset of `dataset` is
    late or holds NaN; its `disk`, in a `CheckpointStore`, is full, and finds the folder
    of checkpoints.

    Args:
      schedule: Faults of the run.
      journal: File that keeps the faults that happened over restarts, shared by all
        processes; None for no file.
      rank: Number of this process; JAX's own number by default.
      checkpoint_dir: Folder whose last checkpoint gets a bit flipped; the disk's by
        default.
      seed: Selects the bit.
    """

    def __init__(
        self,
        schedule: Sequence[Fault],
        *,
        journal: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        self._given_rank = rank
        self._schedule = tuple(schedule)
        self._journal_path = checked_path("journal", journal)
        self._checkpoint_dir = checked_path("checkpoint_dir", checkpoint_dir)
        self._seed = seed
        self._writes = 0
        # Filled by the loop, emptied by the thread that reads the dataset; a deque
        # needs no lock for that.
        self._for_next_batch: collections.deque[Fault] = collections.deque()
        self.disk = Disk(self._before_operation)

    # At its first use: this may be made before the processes have joined.
    @functools.cached_property
    def _rank(self) -> int:
        return process_index() if self._given_rank is None else self._given_rank

    @functools.cached_property
    def _journal(self) -> Journal:
        return Journal(self._journal_path, rank=self._rank)

    def on_state(self, event: StateEvent) -> None:
        """Make the faults of this step happen.

        Raises:
          InjectedError: The fault `raise` is due.
        """
        before = event.step - event.advanced
        for number, fault in enumerate(self._schedule):
            if fault.kind not in _ELSEWHERE and before < fault.at <= event.step:
                self._make_happen(number, fault)

    def damage_state(self, state: PyTree, before: int, step: int) -> PyTree:
        """Return the state after step `step`, with the bits that the faults flip.

        The run calls it behind each call of its step, before hooks see the state.

        Args:
          state: The state of the run.
          before: Step of the call before.
          step: Step of this call.
        """
        for number, fault in enumerate(self._schedule):
            is_now = (
                fault.kind == "flip a bit in the state" and before < fault.at <= step
            )
            if is_now and self._is_due(number, fault):
                pick = random.Random(f"{self._seed}/{number}")
                state = effects.flip_copied_bit(state, fault.replica, pick)
        return state

    def dataset(self, dataset: Dataset) -> Dataset:
        """Return a dataset that is read like `dataset`, with the faults."""
        return faulty(dataset, self._touch_batch)

    def _make_happen(self, number: int, fault: Fault) -> None:
        if not self._is_due(number, fault):
            return
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "raise":
                raise InjectedError(f"{fault}: by the schedule of faults.")
            case "stuck":
                effects.sleep_forever()
            case "hold the interpreter":
                effects.hold_interpreter(fault.seconds or 0.0)
            case "stall input" | "nan in the next batch":
                self._for_next_batch.append(fault)
            case "flip a bit in the last checkpoint" if self._checkpoint_dir:
                pick = random.Random(f"{self._seed}/{number}")
                effects.flip_bit(self._checkpoint_dir, pick)

    def _is_due(self, number: int, fault: Fault) -> bool:
        if fault.rank not in (None, self._rank):
            return False
        if not fault.always and self._journal.has(number, str(fault)):
            return False
        self._journal.note(number, str(fault))
        return True

    def _touch_batch(self, batch: PyTree) -> PyTree:
        while self._for_next_batch:
            fault = self._for_next_batch.popleft()
            if fault.kind == "stall input":
                threading.Event().wait(fault.seconds)
            else:
                batch = effects.poison(batch, fault.replica)
        return batch

    def _before_operation(self, operation: str, path: Path) -> None:
        if path.name == OWNER_NAME and self._checkpoint_dir is None:
            self._checkpoint_dir = path.parent
        if operation != "write_arrays":
            return
        self._writes += 1
        for number, fault in enumerate(self._schedule):
            is_now = fault.kind == "disk full" and fault.at == self._writes
            if is_now and self._is_due(number, fault):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({fault})")


def from_environment(
    *, rank: int | None = None, checkpoint_dir: str | os.PathLike[str] | None = None
) -> Injector:
    """Return an injector of the faults in the environment, if there are any.

    `REPLICATOR_FAULTS` holds the schedule, `REPLICATOR_FAULTS_JOURNAL` the path of the
    journal and `REPLICATOR_FAULTS_SEED` the seed, 0 by default.

    Args:
      rank: See `Injector`.
      checkpoint_dir: See `Injector`.

    Raises:
      ArgumentError: The schedule holds no faults.
    """
    seed = int(os.environ.get(SEED_VARIABLE, "0"))
    return Injector(
        parse(os.environ.get(FAULTS_VARIABLE, ""), seed=seed),
        journal=os.environ.get(JOURNAL_VARIABLE) or None,
        rank=rank,
        checkpoint_dir=checkpoint_dir,
        seed=seed,
    )
