"""Merge the metrics of blocks of examples, on the host, in example order, in float64.

A sum of floating-point numbers depends on its order and grouping, so both are fixed: a
block is summed by itself, blocks one after the other. Blocks of padding alone are left
out, whatever their metrics.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.per_replica import PerReplica
from replicator.base.types import PyTree
from replicator.engine.metrics.declared import Concat, Max, Mean, Min, Sum, is_metric


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockRows:
    """Rows of one block that count.

    Attributes:
      real: Whether each of its rows is an example, [block]; the others only fill up.
      weights: Weight of each row, [block].
      replica: Number of the replica that ran it.
    """

    real: np.ndarray
    weights: np.ndarray
    replica: int


class MetricTotals:
    """Adds up metrics of blocks: `add` each in example order, then `merged`.

    A plain array is one row per example, averaged by the weights of the rows.

    Args:
      num_replicas: Length of a merged `PerReplica` metric.
    """

    def __init__(self, *, num_replicas: int) -> None:
        self.examples = 0
        self._num_replicas = num_replicas
        self._structure: Any = None
        self._totals: list[_Total] = []

    def add(self, metrics: PyTree, rows: BlockRows) -> None:
        """Count one block.

        Args:
          metrics: NumPy leaves; the same structure every time.
          rows: Its examples.
        """
        if not rows.real.any():
            return
        found, structure = jax.tree.flatten(metrics, is_leaf=is_metric)
        if self._structure is None:
            self._structure = structure
            self._totals = [_start(metric, self._num_replicas) for metric in found]
        self.examples += int(rows.real.sum())
        for total, metric in zip(self._totals, found, strict=True):
            total.add(metric, rows)

    def merged(self) -> PyTree:
        """Return the metrics over all blocks: Python numbers, and NumPy arrays."""
        return self._structure.unflatten([total.merged() for total in self._totals])


class _Average:
    """The weighted mean of `Mean`s, or of the rows of plain arrays."""

    def __init__(self) -> None:
        self._sum: Any = np.float64(0)
        self._weight = np.float64(0)

    def add(self, metric: Mean | np.ndarray, rows: BlockRows) -> None:
        if isinstance(metric, Mean):
            value, weight = _wide(metric.value), np.float64(np.asarray(metric.weight))
            # A value of weight 0 may be 0 / 0.
            weighted = value * weight if weight else np.zeros_like(value)
        else:
            counted = rows.weights != 0
            weights = rows.weights[counted].astype(np.float64)
            column = weights.reshape(-1, *[1] * (metric.ndim - 1))
            weighted = (_wide(metric[counted]) * column).sum(0)
            weight = weights.sum()
        self._sum = self._sum + weighted
        self._weight = self._weight + weight

    def merged(self) -> PyTree:
        return _as_python(_divide(self._sum, self._weight))


class _RunningSum:
    def __init__(self) -> None:
        self._sum: Any = 0

    def add(self, metric: Sum, rows: BlockRows) -> None:
        self._sum = self._sum + _wide(metric.value)

    def merged(self) -> PyTree:
        return _as_python(self._sum)


class _Extreme:
    def __init__(self, pick: np.ufunc) -> None:
        self._pick = pick
        self._best: Any = None

    def add(self, metric: Max | Min, rows: BlockRows) -> None:
        value = _wide(metric.value)
        self._best = value if self._best is None else self._pick(self._best, value)

    def merged(self) -> PyTree:
        return _as_python(self._best)


class _Rows:
    """The rows of all examples, in order."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []

    def add(self, metric: Concat, rows: BlockRows) -> None:
        self._rows.append(np.asarray(metric.value)[rows.real])

    def merged(self) -> np.ndarray:
        return np.concatenate(self._rows)


class _EachReplica:
    """The mean over each replica's examples; NaN for one that had none."""

    def __init__(self, num_replicas: int) -> None:
        self._replicas = num_replicas
        self._sums: PyTree = None
        self._weights = np.zeros(num_replicas)

    def add(self, metric: PerReplica, rows: BlockRows) -> None:
        values = jax.tree.map(_wide, metric.value)
        if self._sums is None:
            self._sums = jax.tree.map(
                lambda value: np.zeros((self._replicas, *value.shape)), values
            )
        count = rows.real.sum()
        self._weights[rows.replica] += count

        def add(total: np.ndarray, value: np.ndarray) -> None:
            total[rows.replica] += value * count

        jax.tree.map(add, self._sums, values)

    def merged(self) -> PyTree:
        def divide(total: np.ndarray) -> np.ndarray:
            column = self._weights.reshape(-1, *[1] * (total.ndim - 1))
            return _divide(total, column)

        return jax.tree.map(divide, self._sums)


_Total = _Average | _RunningSum | _Extreme | _Rows | _EachReplica


def _start(metric: PyTree, num_replicas: int) -> _Total:
    match metric:
        case Sum():
            return _RunningSum()
        case Max():
            return _Extreme(np.maximum)
        case Min():
            return _Extreme(np.minimum)
        case Concat():
            return _Rows()
        case PerReplica():
            return _EachReplica(num_replicas)
        case _:
            return _Average()


def _divide(total: Any, weight: Any) -> Any:
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / weight


def _wide(leaf: Any) -> np.ndarray:
    """Return counts as 64-bit integers and other numbers in double precision."""
    array = np.asarray(leaf)
    if jnp.issubdtype(array.dtype, np.complexfloating):
        return array.astype(np.complex128)
    if jnp.issubdtype(array.dtype, np.floating):
        return array.astype(np.float64)
    return array.astype(np.int64)


def _as_python(value: Any) -> PyTree:
    return value if np.ndim(value) else value.item()
