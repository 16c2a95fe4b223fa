"""Return the priorities of samples to their replay table, in the background.

    thread that reads   note(number, keys)   the keys of a batch; they stay on the host
    session's thread    send(number, rows)   its priorities, on the devices; no wait
    own thread          fetches them, joins all that wait, calls `update_priorities`

While the table is away updates wait here. They are few: without it no batch comes.

A table of turns has lost those of the last `keep` batches when it is started again, or
given another position: they are sent again after each `begin`. It counts which of a
batch's rows have theirs, so what is not finite is sent as well, and sent twice is fine.
"""

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from replicator.launchpad_bridge.learner.trajectory_batches import GONE
from replicator.launchpad_bridge.trajectories.table import TableRestartedError
from replicator.training.to_host import to_host

_MOST_KEYS = 65_536  # of one call
_END_S = 30.0  # longest wait for a table that is away, once the run has ended well
_JOIN_S = 60.0
_PAUSE_S = 0.1
_log = logging.getLogger(__name__)

_Update = tuple[np.ndarray, Any]  # keys and rows of a batch, or of several


class PriorityUpdates(contextlib.AbstractContextManager["PriorityUpdates"]):
    """Returns priorities to a table while it is open; sends the last ones at its end.

    A row whose priority is not finite keeps the one that it has.

    Args:
      update: `update(keys=..., values=...)` calls the table.
      is_stopping: Returns whether the program stops: nobody starts a table again.
      keep: Number of batches whose priorities a table of turns may miss; 0 for others.
    """

    def __init__(
        self,
        update: Callable[..., Any],
        is_stopping: Callable[[], bool],
        *,
        keep: int = 0,
    ) -> None:
        self._update = update
        self._is_stopping = is_stopping
        self._is_kept = keep > 0
        # Of the own thread. The newest ones, each of a batch.
        self._recent: collections.deque[_Update] = collections.deque(maxlen=keep)
        # One thread adds a batch's keys before another one can have its rows.
        self._keys: dict[int, np.ndarray] = {}
        # Guards `_waiting`, `_is_again` and `_until_s`; it is held for no call.
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Update] = collections.deque()
        self._is_again = False
        self._until_s: float | None = None  # set at the end
        # Set by the own thread, once; read by others.
        self._failure: Exception | None = None
        # Replaced, never changed: other threads read it.
        self.counts = {"sent": 0, "nonfinite": 0, "lost": 0}
        self._thread = threading.Thread(
            target=self._work, name="replicator-priorities", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            # A table of turns gets them when the run goes on.
            is_worth_it = kind is None and not self._is_kept
            self._until_s = time.monotonic() + (_END_S if is_worth_it else 0.0)
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.warning("`update_priorities` did not return in %.0f s.", _JOIN_S)
        if kind is None:
            self._raise_failure()

    def note(self, number: int, keys: np.ndarray) -> None:
        """Keep the keys of a batch until its priorities come."""
        self._keys[number] = keys

    def send(self, behind: int, rows: Any) -> None:
        """Send the priorities of the last batches before number `behind`.

        Args:
          behind: Number of the batch after them.
          rows: Priorities of one batch or of several, on the devices, in their order;
            nobody waits for them here.

        Raises:
          Exception: The table refused earlier ones.
        """
        self._raise_failure()
        first, left = behind, rows.size
        keys: list[np.ndarray] = []
        while left > 0:
            first -= 1
            keys.insert(0, self._keys.pop(first))
            left -= len(keys[0])
        with self._changed:
            self._waiting.append((np.concatenate(keys), rows))
            self._changed.notify_all()

    def go_on(self, behind: int, rows: np.ndarray) -> None:
        """Send those of the last batches again, as a checkpoint has them.

        Args:
          behind: Number of the batch after them.
          rows: Priorities, [keep, B].
        """
        first, size = behind - len(rows), rows.shape[1]
        numbers = range(max(first, 0), behind)
        with self._changed:
            self._waiting.extend(
                (number * size + np.arange(size), rows[number - first])
                for number in numbers
            )
            self._changed.notify_all()

    def send_again(self) -> None:
        """Send those of the last batches again, after a table's `begin`."""
        with self._changed:
            self._is_again = self._is_kept
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while (updates := self._next()) is not None:
                rows = to_host([rows for _, rows in updates])
                new = [
                    (keys, np.ravel(each))
                    for (keys, _), each in zip(updates, rows, strict=True)
                ]
                keys, values = _joined(new)
                is_finite = np.isfinite(values)
                self._count("nonfinite", len(keys) - int(is_finite.sum()))
                if self._is_kept:
                    keys, values = self._with_recent(new)
                else:
                    keys, values = keys[is_finite], values[is_finite]
                for at in range(0, len(keys), _MOST_KEYS):
                    part = slice(at, at + _MOST_KEYS)
                    self._call(keys[part], values[part])
        except Exception as error:
            self._failure = error

    def _next(self) -> list[_Update] | None:
        """Return all updates that wait, no one if others are due; None at the end."""
        with self._changed:
            while not self._waiting and not self._is_again and self._until_s is None:
                self._changed.wait()
            updates = list(self._waiting)
            self._waiting.clear()
            return updates if updates or self._is_again else None

    def _with_recent(self, new: list[_Update]) -> tuple[np.ndarray, np.ndarray]:
        """Keep updates; return them, after those before if these are due again."""
        with self._changed:
            is_again, self._is_again = self._is_again, False
        before = list(self._recent) if is_again else []
        self._recent.extend(new)
        return _joined([*before, *new])

    def _call(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Call the table until it has them, or it is of no use to go on."""
        while True:
            try:
                self._update(keys=keys, values=values)
            except (*GONE, TableRestartedError) as error:
                if self._gives_up():
                    self._count("lost", len(keys))
                    _log.warning("%d priorities did not arrive: %s", len(keys), error)
                    return
                time.sleep(_PAUSE_S)
            else:
                self._count("sent", len(keys))
                return

    def _gives_up(self) -> bool:
        until_s = self._until_s
        is_late = until_s is not None and time.monotonic() >= until_s
        return is_late or self._is_stopping()

    def _count(self, name: str, count: int) -> None:
        self.counts = {**self.counts, name: self.counts[name] + count}


def _joined(updates: list[_Update]) -> tuple[np.ndarray, np.ndarray]:
    keys = [np.zeros(0, np.int64), *(keys for keys, _ in updates)]
    values = [np.zeros(0, np.float32), *(values for _, values in updates)]
    return np.concatenate(keys), np.concatenate(values)
