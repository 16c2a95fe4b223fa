"""Which row makes room in a full table: the oldest, or that of the lowest priority."""

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np

from replicator.launchpad_bridge.replay.insertion_order import InsertionOrder
from replicator.launchpad_bridge.replay.sum_tree import LowestTree

RemoverName = Literal["oldest", "lowest"]


class RowRemoval(Protocol):
    """State of a remover over the rows of one table; for one thread at a time."""

    def add(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Add rows, int64 [n], that are not in it, with priorities, float64 [n]."""
        ...

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Give rows that are in it other priorities."""
        ...

    def remove(self, slots: np.ndarray) -> None:
        """Remove rows that are in it, each once."""
        ...

    def pop(self, count: int) -> np.ndarray:
        """Remove the rows to go first; return them, int64 [count]."""
        ...


class _RemovesOldest:
    def __init__(self, capacity: int) -> None:
        self._order = InsertionOrder(capacity)

    def add(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._order.add(slots)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Do nothing: priorities have no meaning here."""

    def remove(self, slots: np.ndarray) -> None:
        self._order.remove(slots)

    def pop(self, count: int) -> np.ndarray:
        slots = np.fromiter(itertools.islice(self._order, count), np.int64)
        self._order.remove(slots)
        return slots


class _RemovesLowest:
    def __init__(self, capacity: int) -> None:
        self._tree = LowestTree(capacity)

    def add(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._tree.set(slots, priorities)

    update = add

    def remove(self, slots: np.ndarray) -> None:
        self._tree.set(slots, np.full(len(slots), np.inf))

    def pop(self, count: int) -> np.ndarray:
        return self._tree.pop(count)


REMOVERS: Mapping[str, Callable[[int], RowRemoval]] = MappingProxyType(
    {"oldest": _RemovesOldest, "lowest": _RemovesLowest}
)
"""Makers of the state of each remover, for a capacity."""
