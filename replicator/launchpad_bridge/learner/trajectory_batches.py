"""Batches for a learner, taken out of a table: the dataset of its session.

The session reads ahead and places batches on the devices in the background, and keeps
with each the position of the input after it. A checkpoint holds that position: where
actors take turns, the cut behind the last batch that was learnt from.
"""

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.errors import (
    ArgumentError,
    CallTimeoutError,
    ConnectionLostError,
    ServerStoppedError,
)
from replicator.launchpad_bridge.learner.played import Played
from replicator.launchpad_bridge.trajectories.table import (
    Cut,
    Table,
    TableRestartedError,
    Taken,
)
from replicator.rpc.client.client import Client

GONE = (ConnectionLostError, CallTimeoutError, ServerStoppedError)
"""Errors of a call whose server is being restarted."""
LOOK_S = 0.5
"""Seconds between two checks, in a wait for trajectories, if the program stops."""
_CALL_S = 5.0
_WARN_S = 30.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class TrajectoryBatches(Iterator[PyTree]):
    """Yields {"trajectories": leaves [B, ...], "version": int32 [B]} until a stop.

    Those of a replay table have "probability", float32 [B], too.

    After a learner went back to a checkpoint, trajectories of versions that it has yet
    to reach again are dropped, and counted by the table: no policy lag is below 0, nor
    do variables that it had and lost pass for younger than they are. (Such trajectories
    that are inserted after as many batches are taken again cannot be recognised.)

    It is for one thread, but for `is_stopping` and `reached`.

    Attributes:
      table: Table of trajectories, or a client of it.
      batch_size: B.
      is_stopping: Returns whether to yield no more.
      reached: `reached(version, timeout_s)` waits until the learner published it.
      max_policy_lag: Updates that a trajectory may have missed when it is learnt from;
        older ones are dropped. None for any number.
      samples_per_call: Batches that are taken by one call. They are given out one by
        one; those not given out yet are no part of its position.
      steps_per_call: Batches that the step is given by one call. After a stop those of
        a call that were taken are given out: a shorter call would be compiled.
      note_keys: `note_keys(number, keys)` is called for each batch, before it is given
        out, if its priorities are to go back to the table.
      begun: Called after each `begin` of the table.
      priority_lag: The table's, if actors take turns and priorities go back.
      numbers: `Played.numbers` of all batches taken.
      table_counts: Counts of the table at the last call for a batch.
    """

    table: Table
    batch_size: int
    _: dataclasses.KW_ONLY
    is_stopping: Callable[[], bool]
    reached: Callable[[int, float], bool]
    max_policy_lag: int | None = None
    samples_per_call: int = 1
    steps_per_call: int = 1
    note_keys: Callable[[int, np.ndarray], None] | None = None
    begun: Callable[[], None] | None = None
    priority_lag: int | None = None

    def __post_init__(self) -> None:
        self._number = 0  # of the next batch, and so of its update
        # Of the last batch, as JSON, as `get_state` returns it.
        self._cut: dict[str, Any] | None = None
        self._has_begun = False
        self._waiting: collections.deque[Taken] = collections.deque()
        self._played = Played()
        # Read by other threads, too: replaced, never changed.
        self.numbers = self._played.numbers()
        self.table_counts: dict[str, Any] = {}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        """Return the next batch; wait for trajectories while the program runs.

        The session bounds the wait: `InputOptions.timeout_s`.

        Raises:
          ArgumentError: The table is at another batch.
        """
        started_s = warned_s = time.monotonic()
        while not self.is_stopping() or (
            self._waiting and self._number % self.steps_per_call
        ):
            if self._waiting:
                return self._batch(self._waiting.popleft())
            lag, last = self.max_policy_lag, self._number + self.samples_per_call - 1
            oldest = None if lag is None else max(last - lag, 0)
            if oldest is None or self.reached(oldest, LOOK_S):
                taken, lost = self._try_to_take(oldest)
            else:  # trajectories in the table would be too old by then
                taken, lost = None, f"the learner has not published version {oldest}"
            if taken is not None:
                self._waiting.extend(_split(taken, self.samples_per_call))
                continue
            now_s = time.monotonic()
            if now_s - warned_s >= _WARN_S:
                warned_s = now_s
                _log.warning(
                    "Waited %.0f s for the trajectories of batch %d: %s",
                    *(now_s - started_s, self._number, lost or self.table_counts),
                )
        raise StopIteration

    def _try_to_take(self, oldest: int | None) -> tuple[Taken | None, Exception | None]:
        """Call `take` once; return its result and the error of a table that is gone."""
        try:
            if not self._has_begun:
                self._call("begin", cut=self._cut and Cut.from_json(self._cut))
                self._has_begun = True
                if self.begun is not None:
                    self.begun()
            # A batch is for the update after so many: a later version is not of this
            # learner, but of one that was killed, and went back to its checkpoint. (The
            # published version would be too strict: later ones come while this waits.)
            taken = self._call(
                "take",
                count=self.batch_size * self.samples_per_call,
                oldest=oldest,
                newest=self._number,
                timeout_s=LOOK_S,
            )
        except (TableRestartedError, *GONE) as error:
            # The table is empty, and actors go back to the last batch taken here; or
            # its reply, with a batch, may have been lost.
            self._has_begun = False
            return None, error
        with contextlib.suppress(*GONE):  # the batch was received, and is used
            self.table_counts = self._call("statistics")
        return taken, None

    def _call(self, method: str, **kwargs: Any) -> Any:
        return call_table(self.table, method, **kwargs)

    def _batch(self, taken: Taken) -> PyTree:
        if taken.cut is not None and taken.cut.batch != self._number + 1:
            raise ArgumentError(
                f"The table must be at batch {self._number}, got batch "
                f"{taken.cut.batch - 1}: another learner takes from it. Give each "
                "learner a table of its own."
            )
        order = None if taken.cut is None else taken.cut.order
        table_lag = (order or {}).get("priority_lag")
        if table_lag != self.priority_lag:
            raise ArgumentError(
                f"`priority_lag` of the learner must be that of the table, {table_lag},"
                f" got {self.priority_lag}. Use the same; without one, leave "
                "`priorities` out."
            )
        if self.note_keys is not None:
            if taken.keys is None:
                raise ArgumentError(
                    "`priorities` must go back to a replay table, got one whose samples"
                    " have no keys. Use `lp.ReplayTable`, or leave `priorities` out."
                )
            self.note_keys(self._number, taken.keys)
        self._number += 1
        self._cut = taken.cut and taken.cut.to_json()
        self._played.note(taken, self.table_counts)
        self.numbers = self._played.numbers()
        version = np.asarray(taken.versions, np.int32)
        batch = {"trajectories": taken.trajectories, "version": version}
        if taken.probabilities is not None:
            batch["probability"] = np.asarray(taken.probabilities, np.float32)
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return its position, as plain JSON, for a checkpoint."""
        played = self._played.to_json()
        return {"batch": self._number, "cut": self._cut, "played": played}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a position of `get_state`, which the table gets by `begin`."""
        self._waiting.clear()
        self._number = state["batch"]
        self._cut = state["cut"]
        if "played" in state:  # not in older checkpoints
            self._played = Played.from_json(state["played"])
            self.numbers = self._played.numbers()
        self._has_begun = False


def call_table(table: Any, method: str, **kwargs: Any) -> Any:
    """Call a method of a table, or of a client of one; wait for one that is gone.

    Raises:
      Exception: Any error of the method, or one of `GONE`.
    """
    if isinstance(table, Client):
        return table.call(method, (), kwargs, timeout_s=_CALL_S)
    return getattr(table, method)(**kwargs)


def _split(taken: Taken, parts: int) -> list[Taken]:
    """Return equal ranges of rows; the first one has the episodes."""
    if parts == 1:
        return [taken]
    size = len(taken.versions) // parts

    def rows(start: int) -> Taken:
        def cut(leaf: Any) -> Any:
            return None if leaf is None else leaf[start : start + size]

        return dataclasses.replace(
            taken,
            trajectories=jax.tree.map(cut, taken.trajectories),
            versions=cut(taken.versions),
            episodes=taken.episodes if start == 0 else (),
            keys=cut(taken.keys),
            probabilities=cut(taken.probabilities),
        )

    return [rows(size * part) for part in range(parts)]
