"""Return the priorities of samples to their replay table, in the background.

    thread that reads   note(number, keys)   the keys of a batch; they stay on the host
    session's thread    send(number, rows)   its priorities, on the devices; no wait
    own thread          fetches them, joins all that wait, calls `update_priorities`

While the table is away updates wait here. They are few: without it no batch comes.
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
from replicator.training.to_host import to_host

_MOST_KEYS = 65_536  # of one call
_END_S = 30.0  # longest wait for a table that is away, once the run has ended well
_JOIN_S = 60.0
_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


class PriorityUpdates(contextlib.AbstractContextManager["PriorityUpdates"]):
    """Returns priorities to a table while it is open; sends the last ones at its end.

    A priority that is not finite is left out: its row keeps the one that it has.

    Args:
      update: `update(keys=..., values=...)` calls the table.
      is_stopping: Returns whether the program stops: nobody starts a table again.
    """

    def __init__(
        self, update: Callable[..., Any], is_stopping: Callable[[], bool]
    ) -> None:
        self._update = update
        self._is_stopping = is_stopping
        # One thread adds a batch's keys before another one can have its rows.
        self._keys: dict[int, np.ndarray] = {}
        # Guards `_waiting` and `_until_s`; nothing is called while it is held.
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[np.ndarray, Any]] = collections.deque()
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
            self._until_s = time.monotonic() + (_END_S if kind is None else 0.0)
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

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while updates := self._next():
                keys = np.concatenate([keys for keys, _ in updates])
                rows = to_host([rows for _, rows in updates])
                values = np.concatenate([np.ravel(each) for each in rows])
                is_finite = np.isfinite(values)
                self._count("nonfinite", len(keys) - int(is_finite.sum()))
                keys, values = keys[is_finite], values[is_finite]
                for at in range(0, len(keys), _MOST_KEYS):
                    part = slice(at, at + _MOST_KEYS)
                    self._call(keys[part], values[part])
        except Exception as error:
            self._failure = error

    def _next(self) -> list[tuple[np.ndarray, Any]]:
        """Return all updates that wait; none at the end."""
        with self._changed:
            while not self._waiting and self._until_s is None:
                self._changed.wait()
            updates = list(self._waiting)
            self._waiting.clear()
        return updates

    def _call(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Call the table until it has them, or it is of no use to go on."""
        while True:
            try:
                self._update(keys=keys, values=values)
            except GONE as error:
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
