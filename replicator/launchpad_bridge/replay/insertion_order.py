"""Rows in the order in which they were inserted: a linked list in two arrays."""

from collections.abc import Iterator

import numpy as np


class InsertionOrder:
    """Row numbers, oldest first. For one thread at a time.

    >>> order = InsertionOrder(4)
    >>> order.add(np.array([2, 0, 3]))
    >>> order.remove(np.array([0]))
    >>> list(order), list(order.newest_first())
    ([2, 3], [3, 2])
    """

    def __init__(self, capacity: int) -> None:
        """Make an empty list, for the rows 0 to `capacity` - 1."""
        self._end = capacity  # before the first and after the last row
        self._after = np.full(capacity + 1, capacity, np.int64)
        self._before = np.full(capacity + 1, capacity, np.int64)

    def add(self, slots: np.ndarray) -> None:
        """Add rows, int64 [n], that are not in it, as the newest."""
        chain = np.concatenate(([self._before[self._end]], slots, [self._end]))
        self._after[chain[:-1]] = chain[1:]
        self._before[chain[1:]] = chain[:-1]

    def remove(self, slots: np.ndarray) -> None:
        """Remove rows, int64 [n], that are in it, each once."""
        for slot in slots.tolist():
            before, after = self._before[slot], self._after[slot]
            self._after[before] = after
            self._before[after] = before

    def __iter__(self) -> Iterator[int]:
        return self._walk(self._after)

    def newest_first(self) -> Iterator[int]:
        """Yield the rows, newest first."""
        return self._walk(self._before)

    def _walk(self, following: np.ndarray) -> Iterator[int]:
        slot = int(following[self._end])
        while slot != self._end:
            yield slot
            slot = int(following[slot])
