"""Binary trees over the rows of a table, in arrays: whole batches at once.

Node 1 is the root, node k has the children 2k and 2k + 1, and the leaf of row i is node
`first + i`, where `first` is the power of two at or above the capacity. Leaves without
a row hold the neutral value of the tree.
"""

import numpy as np


class SumTree:
    """Masses of rows, to draw each with a probability in proportion to its mass.

    Each parent is the float64 sum of its two children, so no error adds up over
    updates. For one thread at a time.

    >>> tree = SumTree(3)
    >>> tree.set(np.array([0, 1, 2]), np.array([1.0, 0.0, 3.0]))
    >>> tree.total
    4.0
    >>> tree.find(np.array([0.0, 1.0, 4.0]))
    array([0, 2, 2])
    """

    def __init__(self, capacity: int) -> None:
        """Make a tree whose masses are all 0.

        Args:
          capacity: Number of rows, at least 1.
        """
        self._first = 1 << (capacity - 1).bit_length()
        self._capacity = capacity
        self._nodes = np.zeros(2 * self._first)
        self._pairs = self._nodes.reshape(-1, 2)  # pair k: the children of node k

    @property
    def total(self) -> float:
        """Sum of all masses."""
        return float(self._nodes[1])

    @property
    def masses(self) -> np.ndarray:
        """Masses of all rows, float64 [capacity]; a view, not to be written to."""
        return self._nodes[self._first : self._first + self._capacity]

    def set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Give rows other masses; of one row twice the last counts.

        Args:
          slots: int64 [n], numbers of rows.
          masses: float64 [n], finite, at least 0; with a finite sum over all rows.
        """
        nodes = slots + self._first
        self._nodes[nodes] = masses
        for _ in range(self._first.bit_length() - 1):
            nodes >>= 1
            pairs = self._pairs.take(nodes, axis=0)
            self._nodes[nodes] = pairs[:, 0] + pairs[:, 1]

    def find(self, points: np.ndarray) -> np.ndarray:
        """Return the row whose stretch of [0, total] holds each point.

        Rows of mass 0 have no stretch: none of them is ever returned, also where
        rounding, or a point equal to `total`, leads behind the last stretch.

        Args:
          points: float64 [n] in [0, total], of a tree with a total above 0.

        Returns:
          int64 [n].
        """
        nodes, rest = np.ones(len(points), np.int64), points
        for _ in range(self._first.bit_length() - 1):
            pairs = self._pairs.take(nodes, axis=0)
            left = pairs[:, 0]
            # Not into a half of mass 0. A parent above 0 has a child above 0, so this
            # leads to a leaf above 0 from the root on.
            is_right = (rest >= left) & (pairs[:, 1] > 0)
            rest = rest - left * is_right
            nodes = 2 * nodes + is_right
        return nodes - self._first


class LowestTree:
    """Values of rows, to find the lowest.

    >>> tree = LowestTree(3)
    >>> tree.set(np.array([0, 1, 2]), np.array([2.0, 1.0, 3.0]))
    >>> tree.pop(2)
    array([1, 0])
    """

    def __init__(self, capacity: int) -> None:
        """Make a tree without rows, for `capacity` of them."""
        self._first = 1 << (capacity - 1).bit_length()
        self._nodes = np.full(2 * self._first, np.inf)

    def set(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Give rows, int64 [n], other values, float64 [n]; infinity takes one out."""
        nodes = slots + self._first
        self._nodes[nodes] = values
        for _ in range(self._first.bit_length() - 1):
            nodes >>= 1
            self._nodes[nodes] = np.minimum(
                self._nodes[2 * nodes], self._nodes[2 * nodes + 1]
            )

    def pop(self, count: int) -> np.ndarray:
        """Take out the `count` lowest rows; return them, int64 [count], lowest first.

        Of equal values the row of the lower number goes. There must be as many.
        """
        return np.array([self._pop_one() for _ in range(count)], np.int64)

    def _pop_one(self) -> int:
        nodes, node = self._nodes, 1
        while node < self._first:
            node *= 2
            node += bool(nodes[node] > nodes[node + 1])
        slot = node - self._first
        nodes[node] = np.inf
        while node > 1:
            node //= 2
            nodes[node] = min(nodes[2 * node], nodes[2 * node + 1])
        return slot
