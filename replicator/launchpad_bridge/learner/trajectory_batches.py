"""Batches for a learner, taken out of a table: the dataset of its session.

The session reads ahead and places batches on the devices in the background, and keeps
with each where the input is after it. That is also what a checkpoint holds: where
actors take turns, the cut behind the last batch that was learnt from.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from replicator.base.types import PyTree
from replicator.errors import CallTimeoutError, ConnectionLostError, ServerStoppedError
from replicator.launchpad_bridge.trajectories.table import (
    Cut,
    Table,
    TableRestartedError,
)

GONE = (ConnectionLostError, CallTimeoutError, ServerStoppedError)
"""What a call raises whose server is being started again."""
LOOK_S = 0.5
"""How often a wait for trajectories looks whether the program stops."""
_log = logging.getLogger(__name__)


class TrajectoryBatches(Iterator[PyTree]):
    """Yields {"trajectories": leaves [B, ...], "version": int32 [B]} until a stop.

    It is for one thread, but for `is_stopping` and `reached`.

    Args:
      table: Where trajectories are, or a client of it.
      batch_size: B.
      is_stopping: Whether to yield no more.
      reached: `reached(version, timeout_s)` waits until the learner published it.
      max_policy_lag: Updates that a trajectory may have missed when it is learnt from;
        older ones are dropped. None for any number.
    """

    def __init__(
        self,
        table: Table,
        batch_size: int,
        *,
        is_stopping: Callable[[], bool],
        reached: Callable[[int, float], bool],
        max_policy_lag: int | None = None,
    ) -> None:
        self._table = table
        self._batch_size = batch_size
        self._is_stopping = is_stopping
        self._reached = reached
        self._max_policy_lag = max_policy_lag
        self._number = 0  # of the next batch: what its update is called
        self._cut: Cut | None = None
        self._has_begun = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PyTree:
        """Return the next batch; waits for trajectories while the program runs.

        What bounds the wait is the session's: `InputOptions.timeout_s`.
        """
        told = False
        while not self._is_stopping():
            oldest = None
            if self._max_policy_lag is not None:
                oldest = max(self._number - self._max_policy_lag, 0)
                if not self._reached(oldest, LOOK_S):
                    continue  # whatever is there now would be too old by then
            try:
                if not self._has_begun:
                    self._table.begin(self._cut)
                    self._has_begun = True
                taken = self._table.take(
                    self._batch_size, oldest=oldest, timeout_s=LOOK_S
                )
            except TableRestartedError:
                # It holds nothing: actors go back to behind the last batch taken here.
                self._has_begun = False
                continue
            except GONE as lost:
                if not told:
                    _log.warning("The learner waits for its trajectories: %s", lost)
                told = True
                continue
            if taken is not None:
                self._number += 1
                self._cut = taken.cut
                version = np.asarray(taken.versions, np.int32)
                return {"trajectories": taken.trajectories, "version": version}
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """Return where it is, as plain JSON, for a checkpoint."""
        return {"batch": self._number, "cut": self._cut and self._cut.to_json()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `get_state` was asked; what the table holds is told so."""
        self._number = state["batch"]
        self._cut = state["cut"] and Cut.from_json(state["cut"])
        self._has_begun = False
