"""Records of the newest rows, which nothing but their order of insertion decides.

Serial s, counted from 0 over all rows ever inserted, lies in place s mod capacity; the
oldest row makes room. So numbers and priorities are all that there is to know: two
tables with the same have the same, whatever happened to them before. Pure.
"""

from typing import Any

import numpy as np

from replicator.launchpad_bridge.replay.samplers import ReplaySampler


class RingRows:
    """Serials and priorities of the rows of a table; for one thread at a time.

    >>> ring = RingRows(3, lp.prioritised(exponent=1.0))
    >>> ring.append(4)
    array([0, 1, 2, 0])
    >>> ring.update(np.array([0, 1, 2]), np.array([9.0, 0.0, 3.0]))
    (2, 1)
    >>> ring.draw(np.array([0.1, 0.5]))
    (array([3, 2]), array([0.25, 0.75]))

    Attributes:
      inserted: Number of rows so far, those that went too.
    """

    def __init__(self, capacity: int, sampler: ReplaySampler) -> None:
        """Make the records of an empty table.

        Args:
          capacity: Number of rows that it holds.
          sampler: `uniform()` or `prioritised(exponent)`.
        """
        self.inserted = 0
        self._capacity = capacity
        self._largest = 0.0  # priority that a row was given so far
        # Uniform draws follow from the number of rows; a tree is its masses' alone.
        self._draws = sampler.start(capacity) if sampler.name != "uniform" else None
        self._priorities = np.zeros(capacity if self._draws is not None else 0)

    @property
    def held(self) -> int:
        """Number of rows."""
        return min(self.inserted, self._capacity)

    def append(self, count: int) -> np.ndarray:
        """Insert rows, at most `capacity`, with the largest priority so far.

        Returns:
          Their places, int64 [count].
        """
        slots = self.slots(np.arange(self.inserted, self.inserted + count))
        self.inserted += count
        self._set(slots, np.full(count, self._largest or 1.0))
        return slots

    def slots(self, serials: np.ndarray) -> np.ndarray:
        """Return the places of rows, int64 [n]."""
        return serials % self._capacity

    def draw(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows, with replacement.

        Args:
          numbers: float64 [n] in [0, 1), one for each row.

        Returns:
          Their serials, int64 [n], and the probability of each, float64 [n].
        """
        oldest, held = self.inserted - self.held, self.held
        if self._draws is None:
            ages = np.minimum((numbers * held).astype(np.int64), held - 1)
            return oldest + ages, np.full(len(numbers), 1 / held)
        slots, probabilities = self._draws.draw(numbers, None)
        return oldest + (slots - oldest) % self._capacity, probabilities

    def update(self, serials: np.ndarray, values: np.ndarray) -> tuple[int, int]:
        """Give rows other priorities.

        Args:
          serials: int64 [n]; of one row twice the last counts.
          values: float64 [n], at least 0; one that is not finite changes nothing.

        Returns:
          Number of values that were applied, and of those whose row went.
        """
        is_held = serials >= self.inserted - self.held
        kept = is_held & np.isfinite(values)
        # Of each row the last: the order in which NumPy writes is not to be relied on.
        found, last = np.unique(serials[kept][::-1], return_index=True)
        values = values[kept][::-1]
        self._largest = max([self._largest, *values.tolist()])
        self._set(self.slots(found), values[last])
        return int(np.count_nonzero(kept)), int(np.count_nonzero(~is_held))

    def to_saved(self) -> dict[str, Any]:
        """Return the records as plain data."""
        priorities = self._priorities[: self.held]
        return {
            "inserted": self.inserted,
            "largest": self._largest,
            "priorities": priorities.copy(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over the records that `to_saved` returned, into empty ones."""
        self.inserted, self._largest = saved["inserted"], saved["largest"]
        self._set(np.arange(len(saved["priorities"])), saved["priorities"])

    def _set(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        if self._draws is not None:
            self._priorities[slots] = priorities
            self._draws.update(slots, priorities)
