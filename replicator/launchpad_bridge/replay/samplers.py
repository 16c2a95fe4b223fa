"""Which row of a table is drawn: at random, by priority, the oldest or the newest.

A sampler is a choice that a program makes, and that travels in its recipe. `start`
makes its state over the rows of one table. That state draws from random numbers that it
is handed, so one sequence of calls gives the same rows each time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from replicator.errors import ArgumentError, check_number
from replicator.launchpad_bridge.replay.insertion_order import InsertionOrder
from replicator.launchpad_bridge.replay.sum_tree import SumTree

# Masses are kept within these, so that a sum of them is finite and no row of a
# priority above 0 gets a mass of 0, whatever the exponent.
_LEAST_MASS, _MOST_MASS = 1e-290, 1e290


class RowDraws(Protocol):
    """State of a sampler over the rows of one table; for one thread at a time."""

    @property
    def size(self) -> int:
        """Number of rows that can be drawn."""
        ...

    def rows(self) -> np.ndarray:
        """Return the rows that can be drawn, int64 [size]."""
        ...

    def add(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Add rows, int64 [n], that are not in it, with priorities, float64 [n]."""
        ...

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Give rows that are in it other priorities."""
        ...

    def remove(self, slots: np.ndarray) -> None:
        """Remove rows that are in it, each once."""
        ...

    def draw(
        self, numbers: np.ndarray, left: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows, with replacement; there must be at least one.

        Args:
          numbers: float64 [n] in [0, 1), one for each row.
          left: How often each row of the table may yet be drawn, int64 [capacity];
            None for any number. At random a row may be drawn more often than that.

        Returns:
          The rows, int64 [n] or fewer where no more may be drawn, and the probability
          with which each was drawn, float64.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySampler:
    """Choice of a sampler; `uniform`, `prioritised`, `fifo` and `lifo` make it.

    Attributes:
      name: Name of the function that made it.
      start: Makes its state for a capacity.
    """

    name: str
    start: Callable[[int], RowDraws]


def uniform() -> ReplaySampler:
    """Return the sampler that draws all rows with the same probability.

    >>> uniform().name
    'uniform'
    """
    return ReplaySampler(name="uniform", start=_Uniform)


def prioritised(exponent: float = 0.6) -> ReplaySampler:
    """Return the sampler that draws row i with probability p_i^a / sum_k p_k^a.

    Prioritized experience replay (Schaul et al., 2016, equation 1). A row of priority 0
    is never drawn, also where a = 0.

    Args:
      exponent: a, from 0 to 8; 0 draws all rows alike, 1 in proportion to priorities.

    Raises:
      ArgumentError: `exponent` is not such a number.

    >>> draws = prioritised(0.5).start(3)
    >>> draws.add(np.array([0, 1, 2]), np.array([1.0, 0.0, 9.0]))
    >>> draws.draw(np.array([0.1, 0.9]), None)
    (array([0, 2]), array([0.25, 0.75]))
    """
    check_number("exponent", exponent)
    if not 0 <= exponent <= 8:
        raise ArgumentError(f"`exponent` must be from 0 to 8, got {exponent}. Use 0.6.")
    return ReplaySampler(name="prioritised", start=_StartPrioritised(float(exponent)))


def fifo() -> ReplaySampler:
    """Return the sampler that draws the oldest row; without a limit always the same.

    >>> fifo().name
    'fifo'
    """
    return ReplaySampler(name="fifo", start=_Oldest)


def lifo() -> ReplaySampler:
    """Return the sampler that draws the newest row.

    >>> lifo().name
    'lifo'
    """
    return ReplaySampler(name="lifo", start=_Newest)


class _Uniform:
    def __init__(self, capacity: int) -> None:
        self.size = 0
        self._members = np.zeros(capacity, np.int64)  # the first `size` are rows
        self._place = np.full(capacity, -1, np.int64)  # of each row among them

    def rows(self) -> np.ndarray:
        return self._members[: self.size].copy()

    def add(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        places = np.arange(self.size, self.size + len(slots))
        self._members[places], self._place[slots] = slots, places
        self.size += len(slots)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Do nothing: priorities have no meaning here."""

    def remove(self, slots: np.ndarray) -> None:
        self.size -= len(slots)
        holes = self._place[slots]
        self._place[slots] = -1
        # Those that stay, of the places that are cut off, fill the holes before these.
        moved = self._members[self.size : self.size + len(slots)]
        moved = moved[self._place[moved] >= 0]
        holes = holes[holes < self.size]
        self._members[holes], self._place[moved] = moved, holes

    def draw(
        self, numbers: np.ndarray, left: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        places = (numbers * self.size).astype(np.int64)
        # Rounding may lead to the place behind the last.
        np.minimum(places, self.size - 1, out=places)
        return self._members[places], np.full(len(numbers), 1 / self.size)


@dataclasses.dataclass(frozen=True)
class _StartPrioritised:
    exponent: float

    def __call__(self, capacity: int) -> RowDraws:
        return _Prioritised(capacity, self.exponent)


class _Prioritised:
    def __init__(self, capacity: int, exponent: float) -> None:
        self.size = 0  # rows of mass 0 do not count
        self._exponent = exponent
        self._tree = SumTree(capacity)

    def rows(self) -> np.ndarray:
        return np.flatnonzero(self._tree.masses)

    def add(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        masses = self._masses(priorities)
        self._tree.set(slots, masses)
        self.size += int(np.count_nonzero(masses))

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        before = np.count_nonzero(self._tree.masses[slots])
        self._tree.set(slots, self._masses(priorities))
        self.size += int(np.count_nonzero(self._tree.masses[slots]) - before)

    def remove(self, slots: np.ndarray) -> None:
        self.update(slots, np.zeros(len(slots)))

    def draw(
        self, numbers: np.ndarray, left: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        total = self._tree.total
        slots = self._tree.find(numbers * total)
        return slots, self._tree.masses[slots] / total

    def _masses(self, priorities: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            masses = priorities**self._exponent
        np.clip(masses, _LEAST_MASS, _MOST_MASS, out=masses)
        masses[priorities == 0] = 0
        return masses


class _Oldest:
    def __init__(self, capacity: int) -> None:
        self.size = 0
        self._order = InsertionOrder(capacity)

    def rows(self) -> np.ndarray:
        return np.fromiter(self._order, np.int64)

    def add(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._order.add(slots)
        self.size += len(slots)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Do nothing: priorities have no meaning here."""

    def remove(self, slots: np.ndarray) -> None:
        self._order.remove(slots)
        self.size -= len(slots)

    def draw(
        self, numbers: np.ndarray, left: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        drawn: list[int] = []
        for slot in self._walk():
            wanted = len(numbers) - len(drawn)
            if wanted == 0:
                break
            times = wanted if left is None else min(wanted, int(left[slot]))
            drawn.extend(itertools.repeat(slot, times))
        return np.array(drawn, np.int64), np.ones(len(drawn))

    def _walk(self) -> Iterator[int]:
        return iter(self._order)


class _Newest(_Oldest):
    def _walk(self) -> Iterator[int]:
        return self._order.newest_first()
