"""Distribution of a learner's batches: the first process gives each of them its rows.

The first process takes batches out of the table; the others call it for their rows of
batch 0, 1, 2, … All get the same end of the input, and the same updates behind which a
checkpoint was requested.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import jax

from replicator import rpc
from replicator.base.types import Device, PyTree
from replicator.errors import DistributedError
from replicator.hooks.protocol import StepEvent
from replicator.hooks.schedule import Every
from replicator.launchpad_bridge.learner.trajectory_batches import GONE, LOOK_S
from replicator.launchpad_bridge.trajectories.handler_wait import wait_for

_STOP_COMES_S = 30.0


@dataclasses.dataclass(frozen=True, eq=False)
class Saves(Every):
    """The schedule of a learner's checkpoints, and those requested besides.

    Threads of the server request one; the session's threads read `behind`. All
    processes save the same updates: each batch of the first one has `is_saved`.

    Attributes:
      asked: Set to request a checkpoint behind the next batch that is taken.
      behind: Coming updates at or behind which one was requested. The thread that reads
        batches adds to it, the one that saves removes from it.
    """

    # Excluded from `repr`, which processes compare.
    asked: threading.Event = dataclasses.field(
        default_factory=threading.Event, repr=False
    )
    behind: set[int] = dataclasses.field(default_factory=set, repr=False)

    def decide(
        self, last_s: float | None, event: StepEvent
    ) -> tuple[float | None, bool]:
        """Return the state after `event`, and whether it is due."""
        last_s, is_due = super().decide(last_s, event)
        # A call may make several updates.
        made = {step for step in self.behind.copy() if step <= event.step}
        self.behind.difference_update(made)
        return last_s, is_due or bool(made)


@rpc.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShare:
    """Rows of a batch for one process.

    Attributes:
      batch: The rows; None if no batch follows.
      state: Position of the input after it, in the first process, without the cut.
      is_saved: Whether its update must be saved.
    """

    batch: PyTree
    state: dict[str, Any]
    is_saved: bool


class Shares(Iterator[PyTree]):
    """Batches in the first process: yields its own rows, and keeps those of others.

    One thread iterates; others call `share`. The number of parts that wait is bounded
    by the distance between processes: they read in step.

    Args:
      batches: Iterator of whole batches; `get_state` returns its position.
      processes: Number of processes that share them.
      accumulate: Microbatches of a batch. Each process cuts its own rows into them, so
        it gets a part of each: microbatch j holds the j-th part of the batch.
      saves: Read for each batch: whether to save behind it.
    """

    def __init__(
        self, batches: Any, processes: int, saves: Saves, *, accumulate: int = 1
    ) -> None:
        self._batches = batches
        self._processes = processes
        self._accumulate = accumulate
        self._saves = saves
        # Guards `_parts` and `_ended`; nothing is called while it is held.
        self._changed = threading.Condition()
        self._parts: dict[tuple[int, int], BatchShare] = {}  # by number and process
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        number = self._batches.get_state()["batch"]
        try:
            batch = next(self._batches)
        except BaseException:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            raise
        is_saved = self._saves.asked.is_set()
        if is_saved:
            self._saves.asked.clear()
            self._saves.behind.add(number + 1)
        # The first process saves the cut, which may be large: it has all snapshots.
        state = {**self._batches.get_state(), "cut": None}
        parts = [
            BatchShare(batch=part, state=state, is_saved=is_saved)
            for part in _cut(batch, self._processes, self._accumulate)
        ]
        if len(parts) > 1:
            with self._changed:
                for process, part in enumerate(parts[1:], start=1):
                    self._parts[number, process] = part
                self._changed.notify_all()
        return parts[0].batch

    def share(self, process: int, number: int, timeout_s: float) -> BatchShare | None:
        """Return the rows of a process; None if they are not there in time."""
        with self._changed:
            wait_for(
                self._changed,
                lambda: self._ended or (number, process) in self._parts,
                timeout_s=timeout_s,
            )
            if (number, process) in self._parts:
                return self._parts.pop((number, process))
            return (
                BatchShare(batch=None, state={}, is_saved=False)
                if self._ended
                else None
            )

    def get_state(self) -> dict[str, Any]:
        """Return the position of the whole batches."""
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._batches.set_state(state)


@dataclasses.dataclass(eq=False)
class SharedBatches(Iterator[PyTree]):
    """Batches in the other processes, which call the first one for them.

    Attributes:
      first: Client of the first process.
      process: Number of this process.
      saves: Gets the updates behind which to save.
      stopped: Waits so many seconds for the program to stop; returns whether it does.
      ended: Returns whether to read no more.
    """

    first: Any
    process: int
    saves: Saves
    _: dataclasses.KW_ONLY
    stopped: Callable[[float], bool]
    ended: Callable[[], bool]

    def __post_init__(self) -> None:
        self._state: dict[str, Any] = {"batch": 0, "cut": None}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        while not self.ended():
            number = self._state["batch"]
            try:
                share = self.first.share(self.process, number, LOOK_S)
            except GONE as lost:
                # The group ends as one: processes that live are killed, or stop.
                if self.stopped(LOOK_S):
                    raise StopIteration from None
                raise DistributedError(
                    "The first process of the learner must send batches, got none "
                    f"from it: {lost}. See in its log why it ended."
                ) from lost
            if share is None:
                continue
            if share.batch is None:
                # All end at one step, and save: each waits for the stop request.
                self.stopped(_STOP_COMES_S)
                raise StopIteration
            self._state = share.state
            if share.is_saved:
                self.saves.behind.add(number + 1)
            return share.batch
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """Return the position of the whole batches, in the first process."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._state = state


def devices(replicas: int | None, processes: int) -> list[Device] | None:
    """Return the same number of devices of each process; None for all."""
    if replicas is None or processes == 1:
        return None
    of_process = collections.defaultdict(list)
    for device in jax.devices():
        of_process[device.process_index].append(device)
    each = replicas // processes
    return [device for own in of_process.values() for device in own[:each]]


def _cut(batch: PyTree, parts: int, accumulate: int) -> list[PyTree]:
    """Return each process's rows: an equal range of each microbatch, in order."""
    if parts == 1:
        return [batch]

    def rows(leaf: Any, part: int) -> Any:
        size = len(leaf) // (accumulate * parts)
        ranges = leaf.reshape(accumulate, parts, size, *leaf.shape[1:])
        return ranges[:, part].reshape(accumulate * size, *leaf.shape[1:])

    return [jax.tree.map(partial(rows, part=part), batch) for part in range(parts)]
