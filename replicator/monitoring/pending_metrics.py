"""Metrics as JSON, above all those that no hook was shown when their state was saved.

The loop shows metrics one call late. A run that goes on from such a state shows them
first, so that its records lack no line.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from replicator.base.host.strict_json import strict_json
from replicator.base.trees import leaf_path, nested
from replicator.base.types import PyTree
from replicator.monitoring.writers.writer import named_numbers

_MOST_NDIM = 1  # what is larger is no number, and nobody writes it
MOST_NUMBERS = 10_000
"""Results, and the metrics of a step, are kept without arrays of more numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PendingMetrics:
    """The metrics of the last call, on their way to the hooks.

    Attributes:
      steps: Updates that the call made.
      stacked: Whether each metric has a leading axis of that size.
      metrics: NumPy arrays, or arrays on the devices.
      position: Where the input is after the call's batch.
    """

    steps: int
    stacked: bool
    metrics: PyTree
    position: Any = None

    def names(self) -> tuple[str, ...]:
        """Return the names of the numbers among the metrics; waits for nothing."""
        first = int(self.stacked)
        shapes = jax.tree.map(lambda leaf: np.shape(leaf)[first:], self.metrics)
        like = jax.tree.map(np.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
        return tuple(named_numbers(like))

    def last_numbers(self) -> dict[str, float]:
        """Wait for the metrics, and return the numbers of the last step, by name."""
        metrics = jax.device_get(self.metrics)
        if self.stacked:
            metrics = jax.tree.map(lambda leaf: leaf[-1], metrics)
        return named_numbers(metrics)

    def as_json(self) -> dict[str, Any]:
        """Wait for the metrics, and return plain values; large arrays are left out."""
        most_ndim = _MOST_NDIM + int(self.stacked)
        most = MOST_NUMBERS * (self.steps if self.stacked else 1)
        leaves = _leaves(
            self.metrics,
            keep=lambda array: array.ndim <= most_ndim and array.size <= most,
        )
        return {"steps": self.steps, "stacked": self.stacked, "leaves": leaves}


def in_flight_from_json(value: Mapping[str, Any], *, position: Any) -> PendingMetrics:
    """Return what `as_json` wrote; the metrics as nested dicts."""
    return PendingMetrics(
        steps=value["steps"],
        stacked=value["stacked"],
        metrics=_nested(value["leaves"]),
        position=position,
    )


def result_as_json(metrics: PyTree) -> list[dict[str, Any]]:
    """Return the metrics of a result as plain values; large arrays are left out."""
    return _leaves(metrics, keep=lambda array: array.size <= MOST_NUMBERS)


def result_from_json(leaves: Sequence[Mapping[str, Any]]) -> PyTree:
    """Return what `result_as_json` wrote: nested dicts of numbers and arrays."""
    return jax.tree.map(
        lambda leaf: leaf if leaf.ndim else leaf.item(), _nested(leaves)
    )


def _leaves(
    metrics: PyTree, *, keep: Callable[[np.ndarray], bool]
) -> list[dict[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(metrics))
    arrays = [(path, np.asarray(leaf)) for path, leaf in flat]
    return [
        {
            "path": [leaf_path((entry,)) for entry in path],
            "dtype": str(array.dtype),
            "value": _plain(array),
        }
        for path, array in arrays
        if keep(array)
    ]


def _nested(leaves: Sequence[Mapping[str, Any]]) -> PyTree:
    metrics = nested(
        (leaf["path"] or [""], _array(leaf["value"], leaf["dtype"])) for leaf in leaves
    )
    return metrics[""] if list(metrics) == [""] else metrics


def _plain(array: np.ndarray) -> Any:
    # JSON has no NaN; numbers of all widths pass through float64 unharmed.
    wide = array.astype(np.float64) if array.dtype.kind in "fV" else array
    return [strict_json(number) for number in wide.ravel().tolist()], list(array.shape)


def _array(value: Any, dtype: str) -> np.ndarray:
    numbers, shape = value
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind.kind in "iu":
        read = [int(number) for number in numbers]
    elif kind.kind == "b":
        read = [number == "true" for number in numbers]
    else:
        read = [float(number.strip('"')) for number in numbers]
    return np.asarray(read).astype(kind).reshape(shape)
