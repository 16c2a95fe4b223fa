"""Copies of rows out of a table, for samples and for saves, while others come in.

A copy takes milliseconds, and is made without the table's lock. The places that it
reads are noted, so that an insert that was given one of them waits before it writes.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.launchpad_bridge.replay.held_rows import HeldRows
from replicator.launchpad_bridge.replay.table_saves import TableRecords
from replicator.launchpad_bridge.trajectories.rows import RowMemory

_LOOK_S = 1.0  # between two looks at copies, which end by themselves


class RowCopies:
    """Copies of the rows of one table, which a `TableSaves` saves.

    Attributes:
      memory: Memory of the rows; set, under the lock, before the first is held.
    """

    def __init__(
        self,
        changed: threading.Condition,
        rows: HeldRows,
        counts: Callable[[], dict[str, Any]],
    ) -> None:
        """Take note of the table.

        Args:
          changed: Condition of its lock, on which inserts wait.
          rows: Records of its rows, which the lock guards.
          counts: Method of the table, which returns its counts; called under the
            lock. It does not keep the table.
        """
        self.memory: RowMemory | None = None
        self._changed, self._rows = changed, rows
        self._counts = weakref.WeakMethod(counts)
        self._reads: dict[object, np.ndarray] = {}  # the lock guards it, too

    @contextlib.contextmanager
    def reading(self, slots: np.ndarray) -> Iterator[None]:
        """Keep inserts from writing to places, int64 [n]; entered under the lock.

        The block runs without the lock, which is held again at its end.
        """
        read = object()
        self._reads[read] = slots
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
            del self._reads[read]
            self._changed.notify_all()

    def wait_for_readers(self, slots: np.ndarray) -> None:
        """Wait, under the lock, until nobody reads any of these places, int64 [n]."""
        while any(np.isin(slots, read).any() for read in self._reads.values()):
            self._changed.wait(_LOOK_S)

    def copy(self, slots: np.ndarray) -> PyTree:
        """Return rows in places, int64 [n], as new leaves [n, ...]."""
        assert self.memory is not None, "a row is held"
        return self.memory.read(slots)

    def row_bytes(self) -> int:
        """Return the size of a row, at least 1."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.copy(_ONE))) or 1

    def new_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return places and keys, int64 [n], of rows since the last call, in order."""
        with self._changed:
            return self._rows.new_rows()

    def are_held(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return which rows, int64 [n], still have these keys: bool [n]."""
        with self._changed:
            return self._rows.keys[slots] == keys

    def read_rows(self, slots: np.ndarray, keys: np.ndarray) -> dict[str, Any]:
        """Copy those rows that still have these keys: see `SavableTable`."""
        with self._changed:
            is_held = self._rows.keys[slots] == keys
            slots, keys = slots[is_held], keys[is_held]
            versions = self._rows.versions[slots]
            with self.reading(slots):
                rows = self.copy(slots)
        return {"slots": slots, "keys": keys, "versions": versions, "rows": rows}

    def records(self) -> TableRecords:
        """Return the records of all rows."""
        counts = self._counts()
        assert counts is not None, "the table calls"
        with self._changed:
            return TableRecords(
                self._rows.keys.copy(),
                self._rows.priorities.copy(),
                self._rows.times(),
                counts(),
            )


_ONE = np.zeros(1, np.int64)
