"""Metrics of a call that no hook has been shown when its state was saved.

The loop shows metrics one call late. A run that goes on from such a state shows them
first, so that its records lack no line.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from replicator.protocols import PyTree
from replicator.strict_json import strict_json
from replicator.trees import leaf_path

_MOST_NDIM = 1  # what is larger is no number, and nobody writes it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
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

    def as_json(self) -> dict[str, Any]:
        """Wait for the metrics, and return plain values; large arrays are left out."""
        most = _MOST_NDIM + int(self.stacked)
        flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(self.metrics))
        leaves = [
            {
                "path": [leaf_path((entry,)) for entry in path],
                "dtype": str(np.asarray(leaf).dtype),
                "value": _plain(np.asarray(leaf)),
            }
            for path, leaf in flat
            if np.ndim(leaf) <= most
        ]
        return {"steps": self.steps, "stacked": self.stacked, "leaves": leaves}


def in_flight_from_json(value: Mapping[str, Any], *, position: Any) -> InFlight:
    """Return what `as_json` wrote; the metrics as nested dicts."""
    metrics: dict[str, Any] = {}
    for leaf in value["leaves"]:
        *folders, name = leaf["path"] or [""]
        node = metrics
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = _array(leaf["value"], leaf["dtype"])
    bare = metrics[""] if list(metrics) == [""] else metrics
    return InFlight(
        steps=value["steps"],
        stacked=value["stacked"],
        metrics=bare,
        position=position,
    )


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
